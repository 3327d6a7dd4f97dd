"""Activations between two operations on the GPU."""

from dataclasses import dataclass
from typing import Any

from coldstream.kernels.arithmetic.quantised import QuantActivations
from coldstream.kernels.cuda.array import DeviceArray, as_type
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.router.cuda import NormBefore


@dataclass(frozen=True)
class Activations:
    """Rows of activations, as float32 and quantised."""

    values: DeviceArray  # float32 [T, K]
    quantised: QuantActivations
    before: NormBefore | None = None  # what the router's launch has to compute them from, if it has to

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

    def take(self, indices: DeviceArray) -> "Activations":
        """Copies of the rows `indices`, int64 [n], in memory of PyTorch's own."""
        parts = (part.index_select(0, indices) for part in vars(self.quantised).values())
        values: Any = self.values
        return Activations(values.index_select(0, indices), QuantActivations(*parts))


def as_floats(weight: QuantTensor) -> DeviceArray:
    """The values of an F32 matrix: a view."""
    return as_type(weight.blocks, "float32")
