"""Digests of the CUDA sources of a recorded run, so that pages can name sources that changed since."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from bench.results import ROOT

SUFFIXES = (".cu", ".cuh")


def digests(root: Path = ROOT) -> dict[str, str]:
    """Path below `root` → digest of the contents, for every CUDA source of the package."""
    found = (path for path in (root / "src").rglob("*.cu*") if path.suffix in SUFFIXES)
    return {
        path.relative_to(root).as_posix(): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        for path in sorted(found)
    }


def unseen(recorded: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """The present sources that differ from those of the recorded run, or were not there."""
    return [path for path, digest in present.items() if recorded.get(path) != digest]
