"""Muon: momentum whose update is orthogonalised, for the weight matrices; everything else is left to AdamW.

Source: Jordan et al. 2024 (the quintic Newton–Schulz iteration) with the update scale of Liu et al. 2025,
which lets both optimisers share one learning rate.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, of `matrices [N, r, c]` with r ≤ c.

    bfloat16 on a GPU; on a CPU, most of which have no products of that type, float32.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(-1, -2)
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Takes (parameter, rows) pairs: the parameter is a stack of matrices of `rows` rows each."""

    def __init__(
        self, matrices: Iterable[tuple[Tensor, int]], lr: float, momentum: float, weight_decay: float
    ) -> None:
        matrices = list(matrices)
        self.rows = dict(matrices)
        super().__init__(
            [p for p, _ in matrices], {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        group = self.param_groups[0]
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor, bool]]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(state["momentum"], group["momentum"])
            update = update.view(-1, self.rows[parameter], parameter.shape[-1])
            tall = update.shape[1] > update.shape[2]
            update = update.transpose(1, 2) if tall else update
            by_shape[(update.shape[1], update.shape[2])].append((parameter, update, tall))
        for (_, columns), entries in by_shape.items():
            stacked = orthogonalise(torch.cat([update for _, update, _ in entries]))
            pieces = stacked.split([len(update) for _, update, _ in entries])
            for (parameter, _, tall), piece in zip(entries, pieces, strict=True):
                piece = piece.transpose(1, 2) if tall else piece
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(piece.reshape(parameter.shape), alpha=-group["lr"] * 0.2 * columns**0.5)
