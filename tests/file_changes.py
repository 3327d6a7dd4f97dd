"""Changes of model files in use."""

import os
from pathlib import Path

from coldstream.gguf.reader import GGUFFile


def await_tick(path: Path) -> None:
    """Returns when the file system's clock gives a change of `path` another time than its last one."""
    scratch = path.with_name(f"{path.name}.tick")
    scratch.touch()
    while scratch.stat().st_ctime_ns <= path.stat().st_ctime_ns:
        os.utime(scratch)
    scratch.unlink()


def overwrite(path: Path, offset: int, num_bytes: int = 4096, *, keeps_time: bool = False) -> None:
    """Overwrites some bytes with others; keeps_time: restores the time of writing."""
    await_tick(path)
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(offset)
        old = stream.read(num_bytes)
        stream.seek(offset)
        stream.write(bytes(byte ^ 0x15 for byte in old))
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def overwrite_experts(path: Path, *, keeps_time: bool = False) -> None:
    """Overwrites bytes of a stack of experts."""
    with GGUFFile.open(path) as file:
        info = next(info for name, info in file.tensors.items() if "_exps." in name)
    overwrite(path, info.offset, info.num_bytes, keeps_time=keeps_time)
