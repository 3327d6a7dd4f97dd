"""Texts side by side on the full-size model: tokens a second of all, and the time between two tokens of one.

    python -m bench.engine.gpu_streams full.gguf     writes the file first if it isn't there (21 GB)
    python -m bench.engine.gpu_streams full.gguf --answers 64,512 --experts 3 6.3
    python -m bench.engine.gpu_streams popular.gguf --shared-popularity --answers 64,512 --experts 3 6.3

An engine gets so many requests at once, each with a prompt and a text of its own. Timing begins when every
text has the tokens in which the working set comes in, and ends some tokens later, while all of them go on.
With --answers whole answers are timed instead, from the requests to the last token, with their prompts of so
many tokens: sixteen answers for each number of texts, or as many as there are texts, in several runs.
Greedy text has to walk through the vocabulary, as these files make it do, so that every token is checked.
`gpu_peer.py` measures steps of as many sequences of llama.cpp, without a server around them.
"""

import argparse
import itertools
import math
import shlex
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.device import describe
from bench.engine.gpu import FIRST_ID, numbers, write_model
from bench.engine.gpu_hybrid import GIB, TEXT_STEP, Machine, plan_with
from bench.full_size_model import FULL_SHAPE, POPULAR_SHARE
from bench.results import ROOT, add_result_options, write_result
from coldstream.decoding import SamplingParams
from coldstream.engine import LLM, EngineConfig
from coldstream.engine.answer import Request
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta, Failed
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.submission import Submission
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import find_gpu
from coldstream.models.read_spec import read_spec
from coldstream.placement.plan_file import save_plan
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.machine import measured_hardware

PROMPT, WARM_TOKENS, TIMED_TOKENS = 512, 96, 128
ANSWER_TOKENS, ANSWERS = 128, 16  # tokens of an answer; answers of a number of texts, at least
ROOM = 1536  # tokens that the first text may have before the last one is warm


def request_of(prompt: list[int], count: int) -> Request:
    """For `count` greedy tokens, whichever they are."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count)
    return Request(None, tuple(prompt), params, 0, count, frozenset(), frozenset(), "", 1)


def streams(
    opened: OpenedModel, prompts: list[list[int]], warm: int, timed: int, most: int
) -> dict[str, Any]:
    """All prompts at once, until each has `warm` + `timed` tokens: figures of what comes once all are warm.

    `token_ids` has the texts. Raises the error of a request, and RuntimeError if a text reached `most`
    tokens before.
    """
    token_ids: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    with closing(Engine(opened)) as engine:
        for number, prompt in enumerate(prompts):
            engine.add(Submission(number, request_of(prompt, most)))
        while min(map(len, token_ids)) < warm + timed:
            events = engine.step()
            now = time.perf_counter()
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta):
                    token_ids[event.request_id] += event.piece.token_ids
                    times[event.request_id] += [now] * len(event.piece.token_ids)
    if max(map(len, token_ids)) >= most:
        raise RuntimeError(f"a text ended with its {most} tokens before the others had {warm + timed}")
    start = max(each[warm - 1] for each in times)
    within = [[moment for moment in each if moment >= start] for each in times]
    gaps = np.concatenate([np.diff(each) for each in within])
    end = max(each[-1] for each in within)
    return {
        "streams": len(prompts),
        "tok_s": sum(moment > start for each in within for moment in each) / (end - start),
        "between_ms": {name: 1e3 * float(np.percentile(gaps, q)) for name, q in (("p50", 50), ("p95", 95))},
        "token_ids": token_ids,
    }


def answers(opened: OpenedModel, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    """Seconds until each of these prompts, which come at once, has its answer of `count` tokens; the answers.

    Raises the error of a request.
    """
    token_ids: list[list[int]] = [[] for _ in prompts]
    with closing(Engine(opened)) as engine:
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add(Submission(number, request_of(prompt, count)))
        while min(map(len, token_ids)) < count:
            for event in engine.step():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta):
                    token_ids[event.request_id] += event.piece.token_ids
        seconds = time.perf_counter() - start
    return seconds, token_ids


def walk(first_id: int, start: int, count: int) -> list[int]:
    """Ids of the text from `first_id` on, which the model continues, from a position on."""
    return [first_id + start + i for i in range(count)]


class Walks:
    """Texts that no measurement had before, so that the cache knows nothing of them."""

    def __init__(self) -> None:
        self._num_taken = 0

    def take(self, count: int) -> list[int]:
        """The first ids of so many."""
        numbers = range(self._num_taken, self._num_taken + count)
        self._num_taken += count
        return [FIRST_ID + number * TEXT_STEP % (FULL_SHAPE.vocab - 20_000) for number in numbers]


def check_walks(firsts: list[int], prompt: int, texts: list[list[int]]) -> None:
    """RuntimeError if a text after a prompt of so many tokens left its walk."""
    if texts != [walk(first, prompt, len(text)) for first, text in zip(firsts, texts, strict=True)]:
        raise RuntimeError("not a figure of this model: a text left its walk")


def measure(llm: LLM, counts: list[int]) -> list[dict[str, Any]]:
    """Figures of so many texts, all of them new to the cache. RuntimeError if one leaves its walk."""
    rows, walks = [], Walks()
    for count in counts:
        firsts = walks.take(count)
        prompts, most = [walk(first, 0, PROMPT) for first in firsts], WARM_TOKENS + TIMED_TOKENS + ROOM
        found = streams(llm.opened, prompts, WARM_TOKENS, TIMED_TOKENS, most)
        check_walks(firsts, PROMPT, found.pop("token_ids"))
        rows.append(found)
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def measure_answers(llm: LLM, counts: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """Whole answers to prompts of each length. The first answer, which is the first after the model's
    opening, is not counted.
    """
    rows, walks = [], Walks()
    firsts = walks.take(1)
    answers(llm.opened, [walk(firsts[0], 0, lengths[0])], ANSWER_TOKENS)
    for length, count in itertools.product(lengths, counts):
        rates = []
        for _ in range(math.ceil(ANSWERS / count)):
            firsts = walks.take(count)
            seconds, texts = answers(llm.opened, [walk(first, 0, length) for first in firsts], ANSWER_TOKENS)
            check_walks(firsts, length, texts)
            rates.append(count * ANSWER_TOKENS / seconds)
        rows.append({"streams": count, "prompt": length, "runs_tok_s": rates})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Everything; see the module docstring."""
    hardware = measured_hardware(find_gpu())
    ctx_size = PROMPT + WARM_TOKENS + TIMED_TOKENS + ROOM
    with GGUFFile.open(options.model) as file:
        spec = read_spec(file.metadata, file.tensors)
        config = EngineConfig(str(options.model), device="cuda", vram=100 * GIB, ctx_size=ctx_size)
        sizes = plan_model(config, Sources(file, spec, hardware)).known.model
    machine = Machine(options.model, ctx_size, spec.vocab_size, hardware, sizes, max(options.streams))
    found = []
    placements = options.experts if options.answers else [None, *options.experts]
    for gib in placements:
        plan = plan_with(machine, sizes.all_expert_bytes if gib is None else int(gib * GIB))
        with TemporaryDirectory() as folder:
            kept = Path(folder, "plan.json")
            save_plan(plan, kept)
            with LLM(options.model, device="cuda", plan=str(kept)) as llm:
                if options.answers:
                    rows = measure_answers(llm, options.streams, options.answers)
                else:
                    rows = measure(llm, options.streams)
        share = plan.placement.resident_bytes / sizes.all_expert_bytes
        vram = plan.placement.total_bytes
        found.append({"experts_gib": gib, "experts_share": share, "vram_bytes": vram, "rows": rows})
    return found


def joined(values: list[int]) -> str:
    return ",".join(map(str, values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--experts", type=float, nargs="*", default=[3.0], help="GiB, besides all of them")
    parser.add_argument("--streams", type=numbers, default=[1, 4, 16, 32])
    parser.add_argument("--answers", type=numbers, default=[], help="whole ones, to prompts of these lengths")
    parser.add_argument("--shared-popularity", action="store_true", help="of a file that is written")
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "streams.json")
    options = parser.parse_args()
    popular_share = POPULAR_SHARE if options.shared_popularity else 0.0
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab, popular_share=popular_share)
    asked = ["--experts", *map(str, options.experts), "--streams", joined(options.streams)]
    asked += ["--answers", joined(options.answers)] if options.answers else []
    asked += ["--shared-popularity"] if options.shared_popularity else []
    result = {
        "command": shlex.join(["python", "-m", "bench.engine.gpu_streams", options.model.name, *asked]),
        "machine": describe("cuda"),
        "shared_popularity": options.shared_popularity,
        **({"answer": ANSWER_TOKENS} if options.answers else {"prompt": PROMPT}),
        "placements": run(options),
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
