"""Texts side by side on the full-size model: tokens a second of all, and the time between two tokens of one.

    python -m bench.engine.gpu_streams full.gguf     writes the file first if it isn't there (21 GB)

An engine gets so many requests at once, each with a prompt and a text of its own. Timing begins when every
text has the tokens in which the working set comes in, and ends some tokens later, while all of them go on.
Greedy text has to walk through the vocabulary, as these files make it do, so that every token is checked.
`gpu_peer.py` measures steps of as many sequences of llama.cpp, without a server around them.
"""

import argparse
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
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, write_result
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


def walk(first_id: int, start: int, count: int) -> list[int]:
    """Ids of the text from `first_id` on, which the model continues, from a position on."""
    return [first_id + start + i for i in range(count)]


def measure(llm: LLM, counts: list[int]) -> list[dict[str, Any]]:
    """Figures of so many texts, all of them new to the cache. RuntimeError if one leaves its walk."""
    rows, number = [], 0
    for count in counts:
        firsts = []
        for _ in range(count):
            firsts.append(FIRST_ID + number * TEXT_STEP % (FULL_SHAPE.vocab - 20_000))
            number += 1
        prompts, most = [walk(first, 0, PROMPT) for first in firsts], WARM_TOKENS + TIMED_TOKENS + ROOM
        found = streams(llm.opened, prompts, WARM_TOKENS, TIMED_TOKENS, most)
        texts = found.pop("token_ids")
        if texts != [walk(first, PROMPT, len(text)) for first, text in zip(firsts, texts, strict=True)]:
            raise RuntimeError("not a figure of this model: a text left its walk")
        rows.append(found)
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
    for gib in (None, *options.experts):
        plan = plan_with(machine, sizes.all_expert_bytes if gib is None else int(gib * GIB))
        with TemporaryDirectory() as folder:
            kept = Path(folder, "plan.json")
            save_plan(plan, kept)
            with LLM(options.model, device="cuda", plan=str(kept)) as llm:
                rows = measure(llm, options.streams)
        share = plan.placement.resident_bytes / sizes.all_expert_bytes
        vram = plan.placement.total_bytes
        found.append({"experts_gib": gib, "experts_share": share, "vram_bytes": vram, "rows": rows})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--experts", type=float, nargs="*", default=[3.0], help="GiB, besides all of them")
    parser.add_argument("--streams", type=numbers, default=[1, 4, 16, 32])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "gpu" / "streams.json")
    parser.add_argument("--commit", help="of these sources, where they are without their repository")
    options = parser.parse_args()
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    counts = ",".join(map(str, options.streams))
    asked = ["--experts", *map(str, options.experts), "--streams", counts]
    result = {
        "command": shlex.join(["python", "-m", "bench.engine.gpu_streams", options.model.name, *asked]),
        "machine": describe("cuda"),
        "prompt": PROMPT,
        "placements": run(options),
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
