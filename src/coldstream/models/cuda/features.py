"""The residual streams that a GPU's steps leave for a drafter (`models/dflash/model.py`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from coldstream.kernels.cuda.array import DeviceArray, name_of
from coldstream.kernels.cuda.copy_values import copy_values_cuda
from coldstream.kernels.cuda.memory import Memory

FEATURE_TYPE: Final = torch.bfloat16  # half of the memory of float32


@dataclass(frozen=True)
class Features:
    """Of the rows of the last step, in memory that captured graphs write: [rows, aux_layers · E]."""

    aux_layers: tuple[int, ...]
    values: Any

    @classmethod
    def into(cls, memory: Memory, aux_layers: tuple[int, ...], num_rows: int, hidden_size: int) -> Self:
        """For steps of up to `num_rows` rows."""
        shape = (num_rows, len(aux_layers) * hidden_size)
        return cls(aux_layers, memory.persistent(shape, name_of(FEATURE_TYPE)))

    def keep(self, launch: Callable[..., None], layer: int, x: DeviceArray) -> None:
        """Has `launch` queue the copy of the stream after an auxiliary layer, float32 [T, E]."""
        for i, kept in enumerate(self.aux_layers):
            if kept == layer:
                launch(copy_values_cuda, x, self.values[: len(x), i * x.shape[1] : (i + 1) * x.shape[1]])

    def of(self, rows: "NDArray[np.int64] | slice") -> Any:
        """Those of rows of the last step, [n, aux_layers · E], of a slice as a view."""
        if isinstance(rows, slice):
            return self.values[rows]
        return self.values.index_select(0, torch.from_numpy(rows).cuda())
