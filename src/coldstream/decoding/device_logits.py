"""Logits on a device: protocols for choosing tokens there, and for copying logits to the host."""

from collections.abc import Sequence
from typing import Any, Protocol

from coldstream.decoding.sampling_params import Logits
from coldstream.kernels.sample.settings import RowSettings


class DeviceStep(Protocol):
    """The logits [n, vocab] of one step of a model."""

    def choose(self, rows: Sequence[int], settings: Sequence[RowSettings]) -> list[int | None]:
        """The token that `sample_token` would choose after each of `rows`, at least one, all different.

        None where it would raise. The logits stay as they are.
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
