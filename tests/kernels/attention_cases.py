"""Rows, caches and expected bits for the tests of attention."""

from dataclasses import dataclass, replace

import torch

from coldstream.kernels.attention.cache_types import CACHE_TYPES, CacheType
from coldstream.kernels.attention.exact import attention_exact
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, Caches, RopeSpec, Rows
from coldstream.kernels.rope.reference import rope_angles

EPS = 1e-6
# What rows of normal values are multiplied by to try every kind of scale.
EXTREMES = (0.0, -0.0, 1e-45, 2.0**-99, 2.0**-25, 2.0**-20, 1e5, 1e6, 1e7, 1e19, 1e38, torch.inf, torch.nan)


@dataclass(frozen=True)
class Case:
    """Random rows at `positions` of `state_ids`, over caches full of random numbers below the positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    positions: torch.Tensor
    state_ids: torch.Tensor
    cache_name: str = "f16"
    rope_dims: int = 16
    window: int | None = None

    @property
    def cache_type(self) -> CacheType:
        return CACHE_TYPES[self.cache_name]

    @property
    def num_positions(self) -> int:
        return int(self.positions.max()) + 4

    @property
    def rows(self) -> Rows:
        return Rows(self.positions, self.state_ids)

    def inputs(self) -> list[torch.Tensor]:
        """query_gate, key, value, q_norm, k_norm, angles."""
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        num_rows, width = len(self.positions), self.num_kv_heads * self.head_dim
        return [
            2 * random(num_rows, self.num_heads * 2 * self.head_dim),
            2 * random(num_rows, width),
            random(num_rows, width),
            random(self.head_dim) + 1,
            random(self.head_dim) + 1,
            rope_angles(self.positions, RopeSpec(self.rope_dims, 1e4)),
        ]

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions that no row may look at decode to NaN."""
        generator = torch.Generator().manual_seed(2)
        shape = (int(self.state_ids.max()) + 1, self.num_positions, self.num_kv_heads, self.head_dim)
        caches = []
        for _ in range(2):
            values = torch.randn(shape, generator=generator)
            for state_id in range(shape[0]):
                seen = self.positions[self.state_ids == state_id]
                values[state_id, (int(seen.max()) if len(seen) else -1) + 1 :] = torch.nan
                if self.window is not None and len(seen):
                    values[state_id, : max(0, int(seen.min()) - self.window + 1)] = torch.nan
            caches.append(self.cache_type.encode(values))
        return caches[0], caches[1]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The result [T, H · D] and both caches afterwards, by the exact reference."""
        caches = Caches(*self.caches())
        out = attention_exact(*records(*self.inputs(), window=self.window), caches, self.rows)
        return out, caches.k, caches.v


def records(
    query_gate: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    angles: torch.Tensor,
    window: int | None = None,
) -> tuple[AttentionInputs, AttentionHeads]:
    """Arguments of attention, from the tensors of a case."""
    inputs = AttentionInputs(query_gate, key, value, angles)
    return inputs, AttentionHeads(q_norm, k_norm, EPS, window=window)


def sequences(*parts: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and state_ids of (state_id, first position, count) sequences."""
    positions = [torch.arange(first, first + count) for _, first, count in parts]
    state_ids = [torch.full((count,), state_id) for state_id, _, count in parts]
    return torch.cat(positions).int(), torch.cat(state_ids).int()


def make_case(*parts: tuple[int, int, int], **changes: int | str | None) -> Case:
    case = Case(4, 2, 64, *sequences(*parts))
    return replace(case, **changes)  # type: ignore[arg-type]
