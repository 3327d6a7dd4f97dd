"""Other programs that keep the bus to the GPU busy, until they are ended: what is left is as on a slower bus.

    python -m bench.kernels.busy_bus --programs 3 &

Each copies page-locked memory to the device without pause. The driver deals the bus out to programs, however
many streams one has, so that somebody else gets about 1 / (programs + 1) of it. They print what they move,
and take as much of RAM's bandwidth, of which such a machine has less as well.
"""

import argparse
import multiprocessing
import signal
import sys
import time

import torch

COPY_BYTES = 2**25
QUEUED = 2  # copies, so that the bus does not wait for this program
REPORT_S = 5.0


def keep_busy() -> None:
    """Copies, and prints their rate every few seconds, for ever."""
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
        if time.perf_counter() - since > REPORT_S:
            rate = moved / (time.perf_counter() - since)
            print(f"{rate / 1e9:.1f} GB/s", flush=True)
            moved, since = 0, time.perf_counter()


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
