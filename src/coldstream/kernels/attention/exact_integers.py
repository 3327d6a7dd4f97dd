"""Attention of one row's heads to a block of positions in a cache of an integer type, to the last bit.

Scores and weighted values are products of planes, exact in integers, converted to float32 once per position
and once per block: docs/arithmetic.md, Attention over integers.
"""

from dataclasses import dataclass
from typing import Self

import torch

from coldstream.kernels.arithmetic.reference import fma
from coldstream.kernels.attention.planes import LOW_UNIT, Planes, multiply_planes, round_planes

NUM_PLANES = 2  # of queries and of weights, whatever the type of the cache


@dataclass(frozen=True)
class IntegerHeads:
    """`exact.Heads` of an integer type."""

    query: Planes  # [H, D], rotated
    key: Planes  # [P, H, D]
    value: Planes  # [P, H, D]

    @classmethod
    def of(cls, query: torch.Tensor, key: Planes, value: Planes) -> Self:
        """From rotated float32 queries [H, D]."""
        return cls(round_planes(query, NUM_PLANES), key, value)

    @property
    def num_positions(self) -> int:
        return self.key.codes.shape[0]

    def scores(self, block: slice) -> torch.Tensor:
        """float32 [H, n]: the product, times the query's scale, times the key's."""
        key = _positions(self.key, block)
        products = multiply_planes("hd,phd->hp", self.query, key)
        return products * (self.query.scale * (1 / LOW_UNIT)).unsqueeze(-1) * key.scale.T

    def add(self, weights: torch.Tensor, block: slice, numerator: torch.Tensor) -> torch.Tensor:
        """Rounds weights [H, n] times the values' scales; adds their integer product by one fma."""
        value = _positions(self.value, block)
        # Positions that are not seen have no weight, whatever their scales.
        seen = torch.where(weights == 0, 0.0, weights * value.scale.T)
        scaled = round_planes(seen, NUM_PLANES)
        products = multiply_planes("hp,phd->hd", scaled, value)
        return fma((scaled.scale * (1 / LOW_UNIT)).unsqueeze(-1), products, numerator)


def _positions(planes: Planes, block: slice) -> Planes:
    return Planes(planes.codes[block], planes.scale[block], planes.num_planes)
