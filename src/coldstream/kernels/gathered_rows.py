"""Reads rows of a file's matrix in any order: no block of weights spans two rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coldstream.gguf.reader import GGUFFile, TensorInfo


def read_rows(file: GGUFFile, info: TensorInfo, row_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """The blocks of the rows `row_ids` of the matrix `info`, uint8 [len(row_ids) · row bytes].

    Raises ModelChangedError if the file ends early, and IndexError for a row that the matrix lacks.
    """
    return np.ascontiguousarray(file.read(info).reshape(info.shape[0], -1)[list(row_ids)]).reshape(-1)
