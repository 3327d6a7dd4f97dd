"""What went wrong when rows of a table of n-grams were read."""

import os

from coldstream.errors import ModelChangedError, StorageError
from coldstream.gguf.messages import shorten
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc


def check_ngrams(table: _csrc.NgramTable, file: GGUFFile) -> None:
    """Raises ModelChangedError or StorageError if a row could not be read. What it entered is then lost."""
    if table.problem < 0:
        name = shorten(file.paths[0])
        raise ModelChangedError(f"{name} has become shorter: restore the file and load the model again")
    if table.problem:
        raise StorageError(f"a row of n-grams cannot be read: {os.strerror(table.problem)}")
