"""Hyper-connections: C residual streams side by side, [T, C·E], in place of one with norms.

For one token with streams X_c, the update u of the part before, and that part's logits i:

    X_c   ← X_c + 2 · sigmoid(i_c / C) · u                  `inject`; at first every X_c is the embedding
    X̂_c   = RMS norm of X_c, times a weight of its own      `norm_streams`
    low   = silu(down · X̂ / C)                              `scaled_silu`
    mixed = (Σ_c X̂_c · sigmoid((up · low)_c)) / C           `mix_streams`: what the next part reads
    i     = inject · X̂                                      for that part's output

Every function comes with the one that docs/arithmetic.md defines to the last bit, float32.
"""

import torch

from coldstream.kernels.arithmetic import reference as exact
from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.rms_norm.reference import rms_norm, rms_norm_exact


def inject(
    streams: torch.Tensor | None, update: torch.Tensor, injection: torch.Tensor | None, num_streams: int
) -> torch.Tensor:
    """The streams [T, C·E] after an update [T, E] by logits [T, C]; without streams each is the update."""
    if streams is None or injection is None:
        return update.repeat(1, num_streams)
    weights = 2 * torch.sigmoid(injection / num_streams)
    return streams + (weights.unsqueeze(-1) * update.unsqueeze(-2)).flatten(-2)


def inject_exact(
    streams: torch.Tensor | None, update: torch.Tensor, injection: torch.Tensor | None, num_streams: int
) -> torch.Tensor:
    """`inject` to the last bit."""
    if streams is None or injection is None:
        return update.repeat(1, num_streams)
    weights = 2 * exact.sigmoid(injection / num_streams)
    before = grouped(streams, num_streams, -1)
    return exact.fma(weights.unsqueeze(-1), update.unsqueeze(-2), before).flatten(-2)


def norm_streams(streams: torch.Tensor, weight: torch.Tensor, eps: float, size: int) -> torch.Tensor:
    """The RMS norm of each stream of `size` values in [T, C·E], times `weight` [C·E]."""
    return rms_norm(grouped(streams, -1, size), weight.reshape(-1, size), eps).flatten(-2)


def norm_streams_exact(streams: torch.Tensor, weight: torch.Tensor, eps: float, size: int) -> torch.Tensor:
    """`norm_streams` to the last bit."""
    return rms_norm_exact(grouped(streams, -1, size), weight.reshape(-1, size), eps).flatten(-2)


def scaled_silu(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """silu(x / divisor)."""
    return torch.nn.functional.silu(x / divisor)


def scaled_silu_exact(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """`scaled_silu` to the last bit."""
    return exact.silu(x / divisor)


def mix_streams(normed: torch.Tensor, gates: torch.Tensor, num_streams: int) -> torch.Tensor:
    """The mean of the streams of `normed`, each times the sigmoid of its gates: both [T, C·E] → [T, E]."""
    return grouped(normed * torch.sigmoid(gates), num_streams, -1).mean(dim=-2)


def mix_streams_exact(normed: torch.Tensor, gates: torch.Tensor, num_streams: int) -> torch.Tensor:
    """`mix_streams` to the last bit."""
    opened = grouped(exact.sigmoid(gates), num_streams, -1)
    total = torch.zeros_like(opened[..., 0, :])
    for gate, stream in zip(opened.unbind(-2), grouped(normed, num_streams, -1).unbind(-2), strict=True):
        total = exact.fma(gate, stream, total)
    return total / num_streams
