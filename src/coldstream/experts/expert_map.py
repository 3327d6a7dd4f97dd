"""ExpertMap: how often each expert is used lately and where it lies, for people who watch an engine. Pure."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

Array = np.ndarray[Any, Any]

DECAY: Final = 0.995  # of a use, per step: what a page shows is about the last 200 steps
_MAX_WEIGHT: Final = 1e100  # of a step, before all weights are scaled down


class ExpertUses:
    """The share of recent decode steps that used each expert; older steps count less and less."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._sums = np.zeros((num_layers, num_experts))
        self._first = num_experts * np.arange(num_layers)[:, None]  # numbers of the layers' first experts
        self._all = 0.0
        self._weight = 1.0  # of the next step; growing, so that a step touches only what it used

    def observe(self, used: Array) -> None:
        """A step used these experts: int64 numbers, layer · experts + expert; repeated ones count once."""
        self._sums.reshape(-1)[used] += self._weight
        self._all += self._weight
        self._weight /= DECAY
        if self._weight > _MAX_WEIGHT:
            self._sums /= self._weight
            self._all /= self._weight
            self._weight = 1.0

    def observe_ids(self, ids: Array) -> None:
        """The same by layer: the experts of the step's rows, int [layers, rows · K]."""
        self.observe((ids + self._first).reshape(-1))

    def shares(self) -> Array:
        """float64 [layers, experts] from 0 to 1; all 0 before the first step."""
        return self._sums / (self._all or 1.0)


@dataclass(frozen=True)
class ExpertMap:
    """A picture of all experts whose uses are known, small enough to be sent every second.

    uses: base64 of uint8 [layers, experts]; 255: an expert that every recent decode step used. resident:
    base64 of as many bytes, 1 for an expert in fast memory, the rest 0; None: all of them are. Layers whose
    experts always lie in fast memory may be left out.
    """

    layers: tuple[int, ...]  # numbers of the model's layers
    num_experts: int  # of each layer
    uses: str
    resident: str | None

    @classmethod
    def of(cls, layers: Sequence[int], uses: ExpertUses, resident: Array | None) -> Self:
        """resident: bool [layers, experts], or None if all experts are in fast memory."""
        shares = uses.shares()
        levels = np.rint(255 * shares).astype(np.uint8)
        return cls(
            layers=tuple(layers),
            num_experts=shares.shape[1],
            uses=b64encode(levels.tobytes()).decode(),
            resident=None if resident is None else b64encode(resident.astype(np.uint8).tobytes()).decode(),
        )
