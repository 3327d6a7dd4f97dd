"""The short convolutions around the sublayers of a DFlash 2 drafter."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Convolution:
    """A short causal convolution of noise rows, whose weights depend on the row.

    The same row gives the weights of both sides, before a sublayer and behind it.
    """

    base: torch.Tensor  # [2, kernel, E]
    proj: torch.Tensor  # [2 · kernel · groups, E]

    def dynamic(self, x: torch.Tensor) -> torch.Tensor:
        """The weights of normed rows x [B, E] by side and distance: [B, 2, kernel, groups]."""
        return functional.linear(x, self.proj).view(len(x), 2, self.base.shape[1], -1)

    def apply(self, x: torch.Tensor, dynamic: torch.Tensor, side: int) -> torch.Tensor:
        """Rows [B, E], of which each is a weighted sum of rows of x [B, E] up to its own."""
        num_rows, width = x.shape
        group = width // dynamic.shape[-1]
        result = torch.zeros_like(x)
        for distance in range(self.base.shape[1]):
            weights = self.base[side, distance] + dynamic[:, side, distance].repeat_interleave(group, dim=-1)
            result += weights * functional.pad(x, (0, 0, distance, 0))[:num_rows]
        return result
