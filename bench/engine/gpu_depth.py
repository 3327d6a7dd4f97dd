"""Speed of the full-size model far into a text: filling a long context, and steps of some rows at its end.

    python -m bench.engine.gpu_depth full.gguf     writes the file first if it isn't there (21 GB)

A context is filled once, in the runner's chunks, each timed. At every depth asked for, steps of 1 to 64 rows
continue it, each number of rows in a fork of its own, and their logits are brought to the host; medians,
after two steps that aren't counted: the first copies what a fork shares. Then a greedy text continues it,
each step launched before the host knows its token.
"""

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.device import describe
from bench.engine.gpu import FIRST_ID, numbers, write_model
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, add_result_options, write_result
from coldstream import kvcache
from coldstream.engine import LLM, OpenedModel, SamplingParams
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta
from coldstream.engine.request_reader import RequestReader
from coldstream.engine.submission import Submission
from coldstream.models.runner import ModelRunner

CHUNK = 2048
UNTIMED_STEPS = 2
GENERATED = 32


def seconds_of(runner: ModelRunner, sequence: kvcache.Sequence, token_ids: Sequence[int]) -> float:
    start = time.perf_counter()
    np.asarray(runner.extend(sequence, token_ids))
    return time.perf_counter() - start


def decode_step(
    runner: ModelRunner, sequence: kvcache.Sequence, token_ids: Sequence[int], count: int
) -> float:
    """Median seconds of steps of `count` rows behind what `sequence` has, which stays as it is."""
    fork = runner.fork(sequence)
    samples = [
        seconds_of(runner, fork, token_ids[start : start + count])
        for start in range(0, len(token_ids), count)
    ]
    runner.release(fork)
    return statistics.median(samples[UNTIMED_STEPS:])


def generated(opened: OpenedModel, sequence: kvcache.Sequence, token_ids: list[int]) -> float:
    """Median seconds of a token of a greedy text behind `token_ids`; `sequence` lacks the last of them."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=UNTIMED_STEPS + GENERATED)
    request = RequestReader(opened).of_prompt(token_ids, "prompt", params)
    with closing(Engine(replace(opened, speculation=None))) as engine:
        engine.keep_prefix(token_ids[:-1], sequence)
        engine.add(Submission(0, request))
        times = list[float]()
        while not engine.is_idle:
            times += [time.perf_counter() for event in engine.step() if isinstance(event, Delta)]
    return statistics.median(np.diff(times[UNTIMED_STEPS:]))


def fill(
    opened: OpenedModel, depths: Sequence[int], rows: Sequence[int], repetitions: int
) -> list[dict[str, Any]]:
    """For each depth: the seconds to fill it, those of its last chunk, and those of steps there."""
    runner = opened.runner
    deepest, results, spent = max(depths), [], 0.0
    chunk = math.gcd(CHUNK, *depths)
    num_steps = UNTIMED_STEPS + repetitions
    token_ids = [(FIRST_ID + i) % runner.spec.vocab_size for i in range(deepest + num_steps * max(rows))]
    sequence = runner.new_sequence()
    for start in range(0, deepest, chunk):
        end = start + chunk
        last = seconds_of(runner, sequence, token_ids[start:end])
        spent += last
        if end not in depths:
            continue
        steps = {
            count: decode_step(runner, sequence, token_ids[end : end + num_steps * count], count)
            for count in rows
        }
        results.append(
            {
                "depth": end,
                "fill_s": spent,
                "fill_tok_s": end / spent,
                "last_chunk_ms": 1e3 * last,
                "generated_ms": 1e3 * generated(opened, sequence, token_ids[: end + 1]),
                "step_ms": {str(count): 1e3 * seconds for count, seconds in steps.items()},
            }
        )
        print(results[-1], flush=True)
    runner.release(sequence)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "depth.json")
    parser.add_argument("--cache-type", choices=("i16", "i8", "i4", "i3"), default="i16")
    parser.add_argument(
        "--depths", type=numbers, default=[32768, 131072], help=f"one, or multiples of {CHUNK}"
    )
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 64])
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    if len(options.depths) > 1 and any(depth % CHUNK for depth in options.depths):
        parser.error(f"several depths are multiples of {CHUNK}")
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    words = ["python", "-m", "bench.engine.gpu_depth", options.model.name, "--cache-type", options.cache_type]
    words += ["--depths", ",".join(map(str, options.depths)), "--rows", ",".join(map(str, options.rows))]
    types = {"cache_type_k": options.cache_type, "cache_type_v": options.cache_type}
    most_rows = (UNTIMED_STEPS + options.repetitions) * max(options.rows)
    ctx_size = max(options.depths) + max(most_rows, UNTIMED_STEPS + GENERATED + 1)
    with LLM(options.model, device="cuda", ctx_size=ctx_size, **types) as llm:
        fill(
            llm.opened, [min([CHUNK, *options.depths])], options.rows, 1
        )  # kernels and graphs are there when the clock starts
        result = {
            "command": shlex.join(words),
            "machine": describe("cuda"),
            "cache_type": options.cache_type,
            "repetitions": options.repetitions,
            "depths": fill(llm.opened, options.depths, options.rows, options.repetitions),
        }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
