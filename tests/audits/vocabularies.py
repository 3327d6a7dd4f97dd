"""Real vocabularies of packages: ids beside llama.cpp, over its own cases and over random text.

    python -m tests.audits.vocabularies --out docs/results/vocabularies.json [--downloads DIR]

`llama-cpp-python`'s source archive carries vocabularies of model makers with the ids that are wanted of some
texts. Nothing of them is kept but names and counts.
"""

import argparse
import importlib.metadata
import random
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from bench.results import write_result
from coldstream.gguf import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from tests.audits.template_sources import PACKAGES, archive_of
from tools.llama_cpp import open_vocabulary

NAMES = ("qwen2", "qwen35", "gemma-4")
PACKAGE = next(iter(PACKAGES))
SEPARATOR = "\n__ggml_vocab_test__\n"
NUM_RANDOM = 2000
# Not gemma-4's quotes of strings, which llama.cpp finds in any text.
PIECES = (
    *("a", "The", " cat", " sat", "é", "ß", "e\u0301", "हिन्दी", "汉字", "한국어", "العربية"),
    *("👩‍👩‍👧", "\u200d", "\ufeff", "\0", "\U0010ffff", "▁", "<0x41>", "<|im_end|>", "<think>"),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "'s", "'LL", "'", '"', "<", "</"),
    *("0", "7", "42", "2026", "3.14", "½", "٣", ".", ",", "...", "!?", "(", ")", "{}", "[]", "==", "#"),
    "def f(x):\n    return x",
)


def unpacked(archive: Path, folder: Path) -> dict[str, Path]:
    """The files of `NAMES`, with their cases beside them."""
    found = {}
    with tarfile.open(archive) as sdist:
        for member in sdist:
            for name in NAMES:
                if Path(member.name).name.startswith(f"ggml-vocab-{name}.gguf"):
                    member.name = Path(member.name).name
                    sdist.extract(member, folder, filter="data")
                    found[name] = folder / f"ggml-vocab-{name}.gguf"
    return found


def compare(path: Path) -> dict[str, int]:
    """Texts of the file's own cases, random ones, and how many of both have the same ids."""
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    wanted = [list(map(int, line.split())) for line in Path(f"{path}.out").read_text().split("\n")]
    start = 1 if tokenizer.vocabulary.add_bos else 0
    equal = sum(tokenizer.encode(text)[start:] == ids for text, ids in zip(texts, wanted, strict=False))
    choose = random.Random(0)
    with open_vocabulary(path) as oracle:
        drawn = ["".join(choose.choices(PIECES, k=choose.randint(0, 30))) for _ in range(NUM_RANDOM)]
        same = 0
        for text in drawn:
            ids, theirs = tokenizer.encode(text), oracle.encode(text, False)
            if ids != theirs and ids[start:] != theirs:
                print(f"{path.name}: {text!r}: {ids} and {theirs}", file=sys.stderr)
            same += ids == theirs or ids[start:] == theirs
    tokens = tokenizer.vocab_size
    return {"tokens": tokens, "cases": len(texts), "equal": equal, "random": NUM_RANDOM, "random_equal": same}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--downloads", type=Path, help="keep the package here")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = unpacked(archive_of(PACKAGE, options.downloads or Path(folder)), Path(folder))
        found: dict[str, Any] = {name: compare(paths[name]) for name in NAMES}
    version = importlib.metadata.version("xllamacpp")
    command = "python -m tests.audits.vocabularies"
    write_result(
        {"command": command, "xllamacpp": version, "package": PACKAGE, "vocabularies": found}, options.out
    )
    rows = found.values()
    return int(any(row["equal"] < row["cases"] or row["random_equal"] < row["random"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
