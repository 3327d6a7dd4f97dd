"""The short convolutions around the sublayers of a DFlash 2 drafter."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from coldstream.kernels.draft_block import reference


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
        """See `reference.convolve`; dynamic: as `dynamic` has it."""
        return reference.convolve(x, self.base[side], dynamic[:, side])
