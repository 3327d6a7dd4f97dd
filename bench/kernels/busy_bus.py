"""Another program that keeps the bus to the GPU busy, until it is ended: what is left is as on a slower bus.

    python -m bench.kernels.busy_bus --streams 3 &

Each stream copies page-locked memory to the device without pause, so that a copy of somebody else gets about
1 / (streams + 1) of the bus. It prints what it moves, and takes as much of RAM's bandwidth, of which such a
machine has less as well.
"""

import argparse
import time

import torch

COPY_BYTES = 2**25
REPORT_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=3)
    options = parser.parse_args()
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream() for _ in range(options.streams)]
    targets = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in streams]
    events: list[list[torch.cuda.Event]] = [[] for _ in streams]
    moved, since = 0, time.perf_counter()
    while True:
        for stream, target, queued in zip(streams, targets, events, strict=True):
            while len(queued) < 2:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                    queued.append(torch.cuda.Event())
                    queued[-1].record(stream)
                moved += COPY_BYTES
        for queued in events:
            if queued[0].query():
                queued.pop(0)
        if time.perf_counter() - since > REPORT_S:
            rate = moved / (time.perf_counter() - since)
            print(f"{rate / 1e9:.1f} GB/s", flush=True)
            moved, since = 0, time.perf_counter()


if __name__ == "__main__":
    main()
