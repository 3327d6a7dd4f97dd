"""A checkout of the sources under test."""

import os
import shutil
from pathlib import Path

from bench.results import ROOT
from coldstream.kernels import _csrc


def checkout_of_this(folder: Path) -> Path:
    """The sources of this checkout with the extension, which an editable installation has elsewhere."""
    package = folder / "src" / "coldstream"
    shutil.copytree(
        ROOT / "src" / "coldstream",
        package,
        ignore=shutil.ignore_patterns("_csrc*.so", "__pycache__"),
        copy_function=os.symlink,
    )
    extension = Path(_csrc.__file__)
    (package / "kernels" / extension.name).symlink_to(extension)
    return folder
