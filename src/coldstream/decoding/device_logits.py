"""Logits on a device: protocols for choosing tokens there, and for copying logits to the host."""

from collections.abc import Sequence
from typing import Any, Protocol

from coldstream.decoding.sampling_params import Logits
from coldstream.kernels.sample.settings import RankedTokens, RowSettings


class DeviceChoice(Protocol):
    """Tokens that a device is choosing."""

    @property
    def has_indices(self) -> bool:
        """Whether `index` may be asked: not if the device had no room for all rows at once."""

    def index(self, row: int) -> int:
        """The number of the device's result for the row-th of the rows, as a `ChosenToken` names it."""

    def results(self) -> list[tuple[int, int]]:
        """Waits for the tokens. Each comes with a fault: 0 for none, otherwise the number of logits that are
        not finite, NO_FINITE where all are finite and the best one is not once all are changed, or
        BLOCKS_MISSED where the device has not done it.
        """

    def ranked(self, row: int) -> RankedTokens:
        """Of the row-th of the rows, whose settings want it, behind `results`; not for one with a fault."""


class DeviceStep(Protocol):
    """The logits [n, vocab] of one step of a model."""

    def begin(self, rows: Sequence[int], settings: Sequence[RowSettings]) -> DeviceChoice:
        """Begins to choose what `sample_token` would after each of `rows`, at least one, all different.

        The logits stay as they are.
        """

    def bring(self, rows: Sequence[int]) -> Logits:
        """A copy of these rows, float32 [len(rows), vocab]."""


class DeviceLogits(Protocol):
    """Logits [vocab] of one row of a step; `numpy.asarray` copies them to the host."""

    @property
    def step(self) -> DeviceStep: ...

    @property
    def row(self) -> int: ...

    def __len__(self) -> int: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Logits: ...


AnyLogits = Logits | DeviceLogits
