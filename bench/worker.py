"""Our side of a paired benchmark: the commands of `peer_llama_cpp.py` over a CpuRunner.

python bench/worker.py MODEL THREADS CONTEXT TIER
"""

import json
import sys
import time
from pathlib import Path

from coldstream.models.cpu_runner import CpuRunner
from peer_tokens import random_tokens


def main() -> None:
    path, threads, context, tier = sys.argv[1:]
    runner = CpuRunner.open(Path(path), threads=int(threads), tier=tier, context_length=int(context))
    print(json.dumps({"tier": runner.tier, "threads": runner.threads}), flush=True)
    for line in sys.stdin:
        verb, count = line.split()
        started = time.perf_counter()
        if verb == "prefill":
            runner.reset()
            runner.prefill(random_tokens(int(count), 1))
        else:
            for token in random_tokens(int(count), 2):
                runner.decode(token)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
