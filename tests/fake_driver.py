"""Builds `fake_driver.c`, for processes whose LD_LIBRARY_PATH is its folder."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_driver.c")


def build_driver(folder: Path, **values: int) -> Path:
    """A driver library in `folder`, which is returned. values: macros of the source."""
    macros = [f"-D{name}={value}" for name, value in values.items()]
    library = str(folder / "libcuda.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", *macros, "-o", library, str(SOURCE)], check=True)
    return folder
