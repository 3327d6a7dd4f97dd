"""The memory of a process between steps of one runner.

python step_memory_worker.py MODEL RAM_BYTES NUM_REPEATS

A repeat is a prompt and nine tokens after it: ten steps. Prints KiB of anonymous memory in RAM, and of all
data, written or not: after a third of the repeats, which warm up, after two thirds and after all.
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from one_sequence import open_cpu


def kib(path: str, field: str) -> int:
    """A field of a file of the process."""
    lines = Path("/proc/self", path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    path, ram_bytes, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open_cpu(Path(path), threads=2, context_length=128, ram_bytes=ram_bytes) as runner:
        for _ in range(3):
            for number in range(repeats):
                runner.reset()
                runner.prefill(list(range(1 + 7 * number % 100)))
                for token in range(9):
                    runner.decode(17 * number + token)
            gc.collect()
            print(kib("smaps_rollup", "Anonymous:"), kib("status", "VmData:"))


if __name__ == "__main__":
    main()
