"""Loads a model and answers three requests, again and again, each time with another allocation that fails.

LD_PRELOAD=failing_allocations.so python host_memory_worker.py MODEL RAM_BYTES MOST_REPEATS FIRST STEP

Of at most MOST_REPEATS it makes every STEP-th repeat, from FIRST on. Prints a line for each: which allocation
failed, what became of the load and of each request (the digest of what was computed, or the name of the
error), and how many files and threads are left. First and after each repeat comes one without a failure,
number 0.
"""

import ctypes
import gc
import hashlib
import os
import sys
from collections.abc import Iterator

from coldstream import LLM, SamplingParams
from coldstream.errors import ColdstreamError

FAILING = ctypes.CDLL(None).fail_allocation
FAILING.restype, FAILING.argtypes = ctypes.c_long, [ctypes.c_long]
PROMPTS = ("def add(a, b):", list(range(200)), "return")
NEVER = 0


def outcomes(path: str, ram: int) -> Iterator[str]:
    """Of a load and three requests."""
    try:
        llm = LLM(path, device="cpu", ctx_size=512, ram=ram, threads=2)
    except ColdstreamError as error:
        yield type(error).__name__
        return
    yield "loaded"
    with llm:
        for prompt in PROMPTS:
            try:
                params = SamplingParams(temperature=2, seed=1, max_tokens=4, ignore_eos=True)
                tokens = llm.generate([prompt], params)[0].token_ids
                digest = hashlib.sha256(repr(tokens).encode())
                digest.update(llm.logits(list(tokens)))
                yield digest.hexdigest()[:8]
            except ColdstreamError as error:
                yield type(error).__name__


def chosen_ones(count: int, most: int) -> list[int]:
    """Which of `count` allocations fail: the first ones, and others evenly."""
    first = min(count, most // 2)
    step = max(1, -(-(count - first) // max(1, most - first)))
    return [*range(1, first + 1), *range(first + step, count + 1, step)]


def left_over() -> str:
    """Open files and threads of this process."""
    gc.collect()
    return f"{len(os.listdir('/proc/self/fd'))} {len(os.listdir('/proc/self/task'))}"


def main() -> None:
    path, (ram, most, first, step) = sys.argv[1], map(int, sys.argv[2:])
    list(outcomes(path, ram))  # what is imported, compiled and cached once
    FAILING(NEVER)
    print(NEVER, *outcomes(path, ram), left_over(), flush=True)
    for number in chosen_ones(FAILING(NEVER), most)[first::step]:
        FAILING(number)
        results = list(outcomes(path, ram))
        FAILING(NEVER)
        print(number, *results, left_over(), flush=True)
        print(NEVER, *outcomes(path, ram), left_over(), flush=True)


if __name__ == "__main__":
    main()
