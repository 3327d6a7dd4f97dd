"""Other programs that keep the bus to the GPU busy, until they are ended: what is left is as on a slower bus.

    python -m bench.kernels.busy_bus --programs 3 &

Each copies page-locked memory to the device without pause. The driver deals the bus out to programs, however
many streams one has, so that somebody else gets about 1 / (programs + 1) of it. They print what they move,
and take as much of RAM's bandwidth, of which such a machine has less as well.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

COPY_BYTES = 2**25
QUEUED = 2  # copies, so that the bus does not wait for this program
REPORT_S = 5.0
START_S = 120.0  # in which a program has begun, at most
LEFT_S = 0.4  # of copies that say what is left: the driver's turns are far shorter


def keep_busy(has_begun: Any = None, cpus: Collection[int] = ()) -> None:
    """Copies for ever. Prints the rate every few seconds, or says in `has_begun` that it copies.

    cpus: that it may run on; none: all.
    """
    if cpus:
        os.sched_setaffinity(0, cpus)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    ends = [torch.cuda.Event() for _ in range(QUEUED)]
    moved, since = 0, time.perf_counter()
    while True:
        for end in ends:
            end.synchronize()
            target.copy_(source, non_blocking=True)
            end.record()
            moved += COPY_BYTES
        if has_begun is not None:
            has_begun.release()
            has_begun = None
            since = float("inf")  # nothing is printed
        if time.perf_counter() - since > REPORT_S:
            rate = moved / (time.perf_counter() - since)
            print(f"{rate / 1e9:.1f} GB/s", flush=True)
            moved, since = 0, time.perf_counter()


class Programs:
    """Started programs, of which the first ones copy and the others are stopped."""

    def __init__(self, processes: Collection[multiprocessing.process.BaseProcess]) -> None:
        self._processes = tuple(processes)

    def activate(self, number: int) -> None:
        """So many of them copy, from now on."""
        for place, process in enumerate(self._processes):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT if place < number else signal.SIGSTOP)

    @classmethod
    @contextmanager
    def started(cls, number: int, cpus: Collection[int] = ()) -> "Iterator[Programs]":
        """So many, all of which copy. Raises TimeoutError if one does not begin."""
        context = multiprocessing.get_context("spawn")  # a fork could not use the GPU
        begun = context.Semaphore(0)
        processes = [
            context.Process(target=keep_busy, args=(begun, cpus), daemon=True) for _ in range(number)
        ]
        try:
            for process in processes:
                process.start()
            until = time.monotonic() + START_S
            for _ in processes:
                if not begun.acquire(timeout=max(0.0, until - time.monotonic())):
                    raise TimeoutError(f"not all of {number} programs copied within {START_S:.0f} s")
            yield cls(processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()  # which also ends one that is stopped
                    process.join()


def bytes_left() -> float:
    """Bytes a second that copies of this program get of the bus now."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    ends = [torch.cuda.Event() for _ in range(QUEUED)]
    moved, start = 0, time.perf_counter()
    while time.perf_counter() - start < LEFT_S:
        for end in ends:
            end.synchronize()
            target.copy_(source, non_blocking=True)
            end.record()
            moved += COPY_BYTES
    torch.cuda.synchronize()
    return moved / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")  # a fork could not use the GPU
    programs = [context.Process(target=keep_busy, daemon=True) for _ in range(options.programs)]
    for program in programs:
        program.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which ends the programs as well
    for program in programs:
        program.join()


if __name__ == "__main__":
    main()
