"""The residual streams that a GPU's steps leave for a drafter (`models/dflash/model.py`)."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from coldstream.kernels.cuda.memory import Memory

FEATURE_TYPE: Final = torch.bfloat16  # in which drafters compute on a GPU


@dataclass(frozen=True)
class Features:
    """Of the rows of the last step, in memory that captured graphs write: [rows, taps · E]."""

    taps: tuple[int, ...]
    values: torch.Tensor

    @classmethod
    def into(cls, memory: Memory, taps: tuple[int, ...], num_rows: int, hidden_size: int) -> Self:
        """For steps of up to `num_rows` rows."""
        return cls(taps, memory.persistent((num_rows, len(taps) * hidden_size), FEATURE_TYPE))

    def keep(self, layer: int, x: torch.Tensor) -> None:
        """Queues the copy of the stream after a layer, float32 [T, E], if that is a tap."""
        for i, tap in enumerate(self.taps):
            if tap == layer:
                self.values[: len(x), i * x.shape[1] : (i + 1) * x.shape[1]].copy_(x)

    def of(self, rows: "NDArray[np.int64] | slice") -> torch.Tensor:
        """Those of rows of the last step, [n, taps · E], of a slice as a view."""
        if isinstance(rows, slice):
            return self.values[rows]
        return self.values.index_select(0, torch.from_numpy(rows).cuda())
