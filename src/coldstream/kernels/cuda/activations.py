"""Activations between two operations on the GPU."""

from dataclasses import dataclass

import torch

from coldstream.kernels.arithmetic.quantised import QuantActivations
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.router.cuda import NormBefore


@dataclass(frozen=True)
class Activations:
    """Rows of activations, as float32 and quantised."""

    values: torch.Tensor  # float32 [T, K]
    quantised: QuantActivations
    before: NormBefore | None = None  # what the router's launch has to compute them from, if it has to

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def rows(self, first: int, count: int) -> "Activations":
        """Views of `count` rows."""
        part = slice(first, first + count)
        quantised = self.quantised
        return Activations(
            self.values[part],
            QuantActivations(quantised.q[part], quantised.scales[part], quantised.sums[part]),
        )

    def take(self, indices: torch.Tensor) -> "Activations":
        """Copies of the rows `indices`, int64 [n], in memory of PyTorch's own."""
        parts = (part.index_select(0, indices) for part in vars(self.quantised).values())
        return Activations(self.values.index_select(0, indices), QuantActivations(*parts))

    def copy_(self, other: "Activations") -> None:
        """Copies others of the same shape into these."""
        self.values.copy_(other.values)
        for target, source in zip(vars(self.quantised).values(), vars(other.quantised).values(), strict=True):
            target.copy_(source)


def as_floats(weight: QuantTensor) -> torch.Tensor:
    """The values of an F32 matrix: a view."""
    return weight.blocks.view(torch.float32)
