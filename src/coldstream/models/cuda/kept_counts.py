"""Counts of a model's memory on a GPU, kept from start to start: each takes a tenth of a second of Python.

They are kept in a folder of the user's, as `kept_files.py` says, under a hash of everything that they
follow from. A count that fails is not kept. The unit of work is a count.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from coldstream.gguf.reader import GGUFFile
from coldstream.kept_files import MEMORY_COUNTS, KeptFiles, directory_of
from coldstream.kernels.cuda.limits import device_limits
from coldstream.models.cuda.limits import Limits
from coldstream.models.cuda.memory_plan import CudaMemoryPlan, count_memory
from coldstream.models.spec.model_spec import ModelSpec

PACKAGE = Path(__file__).resolve().parents[2]


def kept_count(file: GGUFFile, spec: ModelSpec, limits: Limits, chunk_size: int) -> CudaMemoryPlan:
    """As `count_memory`, which is asked for what was not counted before. Raises as that does."""
    kept, name = KeptFiles(MEMORY_COUNTS, directory_of(MEMORY_COUNTS)), _name(file, spec, limits, chunk_size)
    if (data := kept.get(name)) is not None:
        return CudaMemoryPlan(**json.loads(data))
    plan = count_memory(file, spec, limits, chunk_size)
    kept.put(name, json.dumps(asdict(plan)).encode())
    return plan


def _name(file: GGUFFile, *parts: Any) -> str:
    """The name of an entry. `repr` of a dataclass has all of its fields."""
    known = (file.fingerprint, file.joined, file.written_ns, device_limits(), sources(PACKAGE), *parts)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


@cache
def sources(package: Path) -> str:
    """A hash over the names, sizes and times of all files of a package, as of the first call."""
    digest = hashlib.sha256()
    for path, status in sorted(_files(str(package))):
        digest.update(repr((path, status)).encode())
    return digest.hexdigest()


def _files(folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Paths below a folder, each with size and time, but for those that only follow from others."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files(entry.path)
            else:
                status = entry.stat()
                yield entry.path, (status.st_size, status.st_mtime_ns)
