"""The text: the running interpreter's standard library source, split once and for ever by a hash of the path.

Left out: generated tables (character-set encodings, the pydoc topics), build settings of the machine at hand
(`_sysconfigdata*`), files that are not UTF-8, exact copies. Nothing here knows about tokens.
"""

import hashlib
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 32
MIN_FILE_BYTES = 64
MAX_FILE_BYTES = 400_000
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "pydoc_data", "lib-dynload"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
TABLE_MARKS = ("decoding_table", "decoding_map", "### Decoding")


@dataclass(frozen=True)
class SourceFile:
    """One source file: its path relative to the library's root (POSIX form) and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The files for training and the held-out files, each sorted by path; no file is in both."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def is_held_out(path: str) -> bool:
    """Whether the file at `path` (relative, POSIX form) is held out: a pure function of the path."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def is_excluded(path: str) -> bool:
    """Whether the relative POSIX `path` is left out whatever it contains."""
    parts = path.split("/")
    return any(part in EXCLUDED_FOLDERS or part.startswith(EXCLUDED_PREFIXES) for part in parts)


def read_source(path: Path) -> str | None:
    """The file's text, or None when it is generated, not UTF-8, too small or too large."""
    raw = path.read_bytes()
    if not MIN_FILE_BYTES <= len(raw) <= MAX_FILE_BYTES:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    generated_table = path.parent.name == "encodings" and any(mark in text for mark in TABLE_MARKS)
    return None if generated_table else text.replace("\r\n", "\n")


def load_corpus(root: Path | None = None) -> Corpus:
    """Read and split every `.py` file under `root` (default: this interpreter's standard library)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    seen: set[bytes] = set()
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        text = None if is_excluded(path) else read_source(file)
        if text is None:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            (held_out if is_held_out(path) else train).append(SourceFile(path, text))
    return Corpus(tuple(train), tuple(held_out))


def xz_bits_per_byte(files: tuple[SourceFile, ...], after: tuple[SourceFile, ...] = ()) -> float:
    """The baseline: `xz -9e` on the files, joined in order of path: bits per byte.

    With `after`, the bits that the files add to an archive of those others.
    """
    seen, joined = (b"".join(file.text.encode() for file in part) for part in (after, files))
    added = _xz_bytes(seen + joined) - (_xz_bytes(seen) if seen else 0)
    return 8 * added / len(joined)


def _xz_bytes(raw: bytes) -> int:
    return len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
