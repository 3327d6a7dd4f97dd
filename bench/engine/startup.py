"""Seconds to open a header of 250k tokens and 250k merges, to print help, and to generate a token.

    python -m bench.engine.startup --out docs/results/startup.json

The floor of opening comes with it: reading the same bytes, decoding them at once and splitting them into as
many strings. The token is the bundled model's on the CPU, from the start of the interpreter to its end. How
much of that time imports take is what `-X importtime` says.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
from bench.results import write_result
from coldstream.gguf import GGUFFile
from coldstream.placement.hardware import Hardware

NUM_TOKENS = 248320
NUM_MERGES = 247587
REPEATS = 9
TOKEN = ("run", "-p", "import", "-n", "1", "--temp", "0", "-q", "--device", "cpu")

OWN_TIME = re.compile(r"^import time: +(\d+) \|", re.MULTILINE)  # microseconds


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


def import_seconds(arguments: Sequence[str]) -> float:
    """What the modules of a command take that are imported before and while it runs."""
    command = [sys.executable, "-X", "importtime", "-m", "coldstream", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sum(map(int, OWN_TIME.findall(done.stderr))) / 1e6


def measure() -> dict[str, object]:
    """Seconds, the best of REPEATS each."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "header.gguf"
        write_header(path)
        with GGUFFile.open(path) as file:
            words = [*file.metadata["tokenizer.ggml.tokens"], *file.metadata["tokenizer.ggml.merges"]]
        joined = "\0".join(words).encode()
        help_command = [sys.executable, "-m", "coldstream", "--help"]
        run_command = [sys.executable, "-m", "coldstream", *TOKEN]
        return {
            "command": "python -m bench.engine.startup",
            "header_bytes": path.stat().st_size,
            "header_strings": len(words),
            "floor_s": best_seconds(lambda: (path.read_bytes(), joined.decode().split("\0"))),
            "open_s": best_seconds(lambda: GGUFFile.open(path).close()),
            "help_s": best_seconds(lambda: subprocess.run(help_command, check=True, capture_output=True)),
            "token_s": best_seconds(lambda: subprocess.run(run_command, check=True, capture_output=True)),
            "token_imports_s": min(import_seconds(TOKEN) for _ in range(REPEATS)),
            "load_average": os.getloadavg()[0],
            "cpu": Hardware.measure().cpu_name,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure()
    write_result(result, options.out)


if __name__ == "__main__":
    main()
