"""The residual streams that a GPU's steps leave for a drafter (`models/dflash/model.py`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.contents import take_rows
from coldstream.kernels.cuda.copy_values import copy_values_cuda
from coldstream.kernels.cuda.memory import Memory

FEATURE_TYPE: Final = "bfloat16"  # half of the memory of float32


@dataclass(frozen=True)
class Features:
    """Of the rows of the last step, in memory that captured graphs write: [rows, aux_layers · E]."""

    aux_layers: tuple[int, ...]
    values: DeviceArray

    @classmethod
    def into(cls, memory: Memory, aux_layers: tuple[int, ...], num_rows: int, hidden_size: int) -> Self:
        """For steps of up to `num_rows` rows."""
        shape = (num_rows, len(aux_layers) * hidden_size)
        return cls(aux_layers, memory.persistent(shape, FEATURE_TYPE))

    def keep(self, launch: Callable[..., None], layer: int, x: DeviceArray) -> None:
        """Has `launch` queue the copy of the stream after an auxiliary layer, float32 [T, E]."""
        for i, kept in enumerate(self.aux_layers):
            if kept == layer:
                launch(copy_values_cuda, x, self.values[: len(x), i * x.shape[1] : (i + 1) * x.shape[1]])

    def of(self, rows: "NDArray[np.int64] | slice") -> DeviceArray:
        """Those of rows of the last step, [n, aux_layers · E], of a slice as a view."""
        return self.values[rows] if isinstance(rows, slice) else take_rows(self.values, rows)
