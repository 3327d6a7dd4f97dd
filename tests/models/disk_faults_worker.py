"""One runner with experts on the disk, in a process whose pread may be faulty.

python disk_faults_worker.py MODEL RAM_BYTES REQUESTS

All requests are the same. Prints a line for each: the digest of its logits, or the name of its error. Then it
prints the number of reads that were tried again, and whether they went past the page cache.
"""

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.runners import open_cpu_runner
from coldstream.errors import ColdstreamError


def main() -> None:
    path, ram_bytes, requests = sys.argv[1:]
    with open_cpu_runner(Path(path), threads=2, context_length=64, ram_bytes=int(ram_bytes)) as runner:
        for _ in range(int(requests)):
            try:
                print(hashlib.sha256(runner.logits(list(range(40))).tobytes()).hexdigest())
            except ColdstreamError as error:
                print(type(error).__name__)
        if runner.disk is not None:
            print(runner.disk.retries, runner.disk.is_direct)


if __name__ == "__main__":
    main()
