"""The residual streams that a GPU's steps leave for a drafter (`models/dflash/model.py`)."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from coldstream.kernels.cuda.memory import Memory

FEATURE_TYPE: Final = torch.bfloat16  # half of the memory of float32


@dataclass(frozen=True)
class Features:
    """Of the rows of the last step, in memory that captured graphs write: [rows, aux_layers · E]."""

    aux_layers: tuple[int, ...]
    values: torch.Tensor

    @classmethod
    def into(cls, memory: Memory, aux_layers: tuple[int, ...], num_rows: int, hidden_size: int) -> Self:
        """For steps of up to `num_rows` rows."""
        return cls(aux_layers, memory.persistent((num_rows, len(aux_layers) * hidden_size), FEATURE_TYPE))

    def keep(self, layer: int, x: torch.Tensor) -> None:
        """Queues the copy of the stream after a layer, float32 [T, E], if that is an auxiliary one."""
        for i, kept in enumerate(self.aux_layers):
            if kept == layer:
                self.values[: len(x), i * x.shape[1] : (i + 1) * x.shape[1]].copy_(x)

    def of(self, rows: "NDArray[np.int64] | slice") -> torch.Tensor:
        """Those of rows of the last step, [n, aux_layers · E], of a slice as a view."""
        if isinstance(rows, slice):
            return self.values[rows]
        return self.values.index_select(0, torch.from_numpy(rows).cuda())
