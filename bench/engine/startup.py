"""Seconds to open a header of 250k tokens and 250k merges, and to print the help of the command line.

    python -m bench.engine.startup --out docs/results/startup.json

The floor of opening comes with it: reading the same bytes, decoding them at once and splitting them into as
many strings.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
from bench.results import write_result
from coldstream.gguf import GGUFFile

NUM_TOKENS = 248320
NUM_MERGES = 247587
REPEATS = 5


def write_header(path: Path) -> None:
    rng = random.Random(0)

    def word() -> str:
        return ("Ġ" if rng.random() < 0.4 else "") + f"{rng.getrandbits(40):x}"[: rng.randrange(1, 9)]

    writer = gguf.GGUFWriter(path, "qwen35moe")
    writer.add_array("tokenizer.ggml.tokens", [word() + word() for _ in range(NUM_TOKENS)])
    writer.add_array("tokenizer.ggml.token_type", [1] * NUM_TOKENS)
    writer.add_array("tokenizer.ggml.merges", [f"{word()} {word()}" for _ in range(NUM_MERGES)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def best_seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def measure() -> dict[str, object]:
    """Seconds, the best of REPEATS each."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "header.gguf"
        write_header(path)
        with GGUFFile.open(path) as file:
            words = [*file.metadata["tokenizer.ggml.tokens"], *file.metadata["tokenizer.ggml.merges"]]
        joined = "\0".join(words).encode()
        help_command = [sys.executable, "-m", "coldstream", "--help"]
        return {
            "command": "python -m bench.engine.startup",
            "header_bytes": path.stat().st_size,
            "header_strings": len(words),
            "floor_s": best_seconds(lambda: (path.read_bytes(), joined.decode().split("\0"))),
            "open_s": best_seconds(lambda: GGUFFile.open(path).close()),
            "help_s": best_seconds(lambda: subprocess.run(help_command, check=True, capture_output=True)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure()
    write_result(result, options.out)


if __name__ == "__main__":
    main()
