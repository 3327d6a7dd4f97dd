"""How long opening a model takes whose header holds 250k tokens and 250k merges.

    python bench/open_header.py

Prints the floor first: reading the same bytes, decoding them at once and splitting them into as many strings.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
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


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "header.gguf"
        write_header(path)
        with GGUFFile.open(path) as file:
            words = [*file.metadata["tokenizer.ggml.tokens"], *file.metadata["tokenizer.ggml.merges"]]
        joined = "\0".join(words).encode()
        floor = best_seconds(lambda: (path.read_bytes(), joined.decode().split("\0")))
        opened = best_seconds(lambda: GGUFFile.open(path).close())
        print(f"header {path.stat().st_size / 1e6:.1f} MB, {len(words)} strings")
        print(f"floor  {1e3 * floor:6.1f} ms")
        print(f"open   {1e3 * opened:6.1f} ms, best of {REPEATS}")


if __name__ == "__main__":
    main()
