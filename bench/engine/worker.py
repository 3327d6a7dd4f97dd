"""Our side of a paired benchmark: the commands of `peer_llama_cpp.py` over a CpuRunner.

python -m bench.engine.worker MODEL THREADS CONTEXT TIER [RAM_BYTES]

An answer to `generate` has the statistics of the disk tier besides.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench.peers.peer_tokens import FIRST_TOKEN, PROMPT_LENGTH, random_tokens
from bench.runners import open_cpu_runner
from coldstream.kvcache import Sequence
from coldstream.kvcache.batch import Batch, Segment
from coldstream.models.cpu.runner import CpuRunner


def generate(runner: CpuRunner, sequence: Sequence, token: int, count: int) -> list[int]:
    """`count` tokens after `token`, the most likely each."""
    tokens = []
    for _ in range(count):
        token = int(runner.extend(sequence, (token,)).argmax())
        tokens.append(token)
    return tokens


def start(runner: CpuRunner, count: int) -> list[Sequence]:
    """`count` sequences after a prompt each."""
    sequences = [runner.new_sequence() for _ in range(count)]
    for number, sequence in enumerate(sequences):
        runner.extend(sequence, random_tokens(PROMPT_LENGTH, number))
    return sequences


def steps(runner: CpuRunner, sequences: list[Sequence], count: int) -> None:
    """`count` steps of a token for each sequence."""
    for token in random_tokens(count, 2):
        segments = [Segment(sequence, ((token + row) % 256,)) for row, sequence in enumerate(sequences)]
        runner.step(Batch(tuple(segments)))


def main() -> None:
    path, threads, context, tier, *ram = sys.argv[1:]
    runner = open_cpu_runner(
        Path(path),
        threads=int(threads),
        tier=tier,
        context_length=int(context),
        ram_bytes=int(ram[0]) if ram else None,
    )
    print(json.dumps({"tier": runner.tier, "threads": runner.threads}), flush=True)
    next_token, sequence = FIRST_TOKEN, runner.new_sequence()
    kept, side_by_side = runner.checkpoint(sequence), list[Sequence]()
    for line in sys.stdin:
        verb, count = line.split()
        answer: dict[str, object] = {}
        started = time.perf_counter()
        if verb == "prefill":
            runner.clear(sequence)
            runner.extend(sequence, random_tokens(int(count), 1))
        elif verb == "append":
            runner.extend(sequence, random_tokens(int(count), 1))
        elif verb == "keep":
            kept = runner.checkpoint(sequence)
        elif verb == "back":
            runner.restore(sequence, kept)
        elif verb == "start":
            runner.clear(sequence)
            for other in side_by_side:
                runner.release(other)
            side_by_side = start(runner, int(count))
        elif verb == "steps":
            steps(runner, side_by_side, int(count))
        elif verb == "generate":
            tokens = generate(runner, sequence, next_token, int(count))
            next_token = tokens[-1]
            answer = {"tokens": tokens, "disk": asdict(runner.disk) if runner.disk else None}
        else:
            for token in random_tokens(int(count), 2):
                runner.extend(sequence, (token,))
        print(json.dumps({"seconds": time.perf_counter() - started, **answer}), flush=True)


if __name__ == "__main__":
    main()
