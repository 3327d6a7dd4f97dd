"""Activations between two operations on the GPU."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coldstream.kernels.arithmetic.quantised import QuantActivations
from coldstream.kernels.cuda.array import DeviceArray, as_type
from coldstream.kernels.cuda.contents import take_rows
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.router.cuda import NormBefore


@dataclass(frozen=True)
class Activations:
    """Rows of activations, as float32 and quantised."""

    values: DeviceArray  # float32 [T, K]
    quantised: QuantActivations
    before: NormBefore | None = None  # what the router's launch has to compute them from, if it has to
    for_router: DeviceArray | None = None  # float32 [T, K], what the router reads in place of the values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def rows(self, first: int, count: int) -> "Activations":
        """Views of `count` rows."""
        part = slice(first, first + count)
        quantised = self.quantised
        return Activations(
            self.values[part],
            QuantActivations(quantised.q[part], quantised.scales[part], quantised.sums[part]),
        )

    def take(self, rows: NDArray[np.int64]) -> "Activations":
        """Copies of rows by their numbers, in memory of their own. Raises OutOfMemoryError, DeviceError."""
        parts = (take_rows(part, rows) for part in vars(self.quantised).values())
        return Activations(take_rows(self.values, rows), QuantActivations(*parts))


def as_floats(weight: QuantTensor) -> DeviceArray:
    """The values of an F32 matrix: a view."""
    return as_type(weight.blocks, "float32")
