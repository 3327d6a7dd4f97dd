"""Single heads of attention over random data, and their results in float64: to measure roundings on."""

from typing import NamedTuple

import torch

HEAD_DIMS = (128, 256)
POSITIONS, ROWS = 1024, 32
OUTLIERS = (1, 20, 100)  # by what a planted channel is greater


class RandomHead(NamedTuple):
    """Queries [ROWS, 1, D] of the last position, keys and values [POSITIONS, 1, D] of all."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """int64 [ROWS]."""
        return torch.full((ROWS,), POSITIONS - 1)


def random_head(head_dim: int, outlier: float, seed: int) -> RandomHead:
    """A head of normal numbers, with two channels of keys and values times `outlier`."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(count, 1, head_dim, generator=generator) for count in (ROWS, POSITIONS, POSITIONS)
    )
    query *= 2  # so that some positions weigh much
    channels = torch.tensor([3, head_dim // 2 + 5])
    key[..., channels] *= outlier
    query[..., channels] /= outlier  # as a model does whose scores stay what they are
    value[..., channels] *= outlier
    return RandomHead(query, key, value)


def float_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Rows [L, H, D] at `positions` [L], over keys and values [P, G, D], in float64: [L, H, D]."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("lhd,phd->hlp", query, key) * query.shape[-1] ** -0.5
    outside = torch.arange(key.shape[0]) > positions.unsqueeze(-1)
    return torch.einsum("hlp,phd->lhd", scores.masked_fill(outside, -torch.inf).softmax(dim=-1), value)


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The RMS difference over the RMS size of `exact`."""
    return float(((result - exact).square().mean() / exact.square().mean()).sqrt())
