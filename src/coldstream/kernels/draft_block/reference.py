"""What a draft block computes between its products, in PyTorch and in any float type.

Nothing that a text depends on is computed here, so sums have no written order.
"""

import torch
from torch.nn import functional


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, computed in float32; of x's type."""
    return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rotate(heads: torch.Tensor, rotations: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Heads [n, heads, head_dim], whose halves are rotated against each other.

    rotations: cosines and sines, float32 [n, 1, head_dim / 2].
    """
    cos, sin = rotations
    low, high = heads.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of queries [B, heads, d] to keys and values [L, kv_heads, d]: [B, heads · d].

    mask: bool [B, L], true where a key is seen; None: all are.
    """
    count, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    # The queries of all heads that share keys are rows of one product, so that keys are not repeated.
    group = num_heads // num_kv_heads
    grouped = queries.view(count, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    mixed = functional.scaled_dot_product_attention(
        grouped.reshape(1, num_kv_heads, group * count, head_dim),
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        None if mask is None else mask.repeat(group, 1),
    )
    by_row = mixed.view(num_kv_heads, group, count, head_dim).permute(2, 0, 1, 3)
    return by_row.reshape(count, num_heads * head_dim)


def gated(mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Outputs of attention [B, heads · d], of which the softplus of gates [B, heads] multiplies each head."""
    heads = mixed.view(*gates.shape, -1) * functional.softplus(gates.float())[:, :, None].to(mixed.dtype)
    return heads.view(mixed.shape)


def norm_features(features: torch.Tensor, weights: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of every auxiliary layer's part of features [n, layers · E] by weights [layers, E]."""
    parts = features.view(len(features), *weights.shape)
    normed = [norm(parts[:, layer], weight, eps) for layer, weight in enumerate(weights)]
    return torch.cat(normed, dim=-1)


def convolve(x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
    """Rows [B, E], of which each is a weighted sum of rows of x [B, E] up to its own.

    base: [kernel, E], the weight of each channel by distance; dynamic: [B, kernel, groups], what is added to
    that of each group of neighbouring channels in a row.
    """
    num_rows, width = x.shape
    group = width // dynamic.shape[-1]
    result = torch.zeros_like(x)
    for distance in range(len(base)):
        weights = base[distance] + dynamic[:, distance].repeat_interleave(group, dim=-1)
        result += weights * functional.pad(x, (0, 0, distance, 0))[:num_rows]
    return result


def pair_log_probs(
    predecessors: torch.Tensor, projected: torch.Tensor, successors: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of candidates after each one before, over the candidates: [L, K] → [L, K, K].

    own: [L, K], of the candidates alone. predecessors: [L, K, rank], of those of the position before.
    projected: [L, rank], of the rows' states. successors: [L, K, rank].
    """
    pairs = (predecessors * projected[:, None]) @ successors.transpose(1, 2)
    return functional.log_softmax(own[:, None] + pairs, dim=-1)


def likeliest_chain(token_ids: torch.Tensor, log_probs: torch.Tensor, length: int) -> list[int]:
    """The first `length` tokens of the chain that takes the likeliest candidate after each, of equal ones the
    first.

    token_ids: [L, K]; log_probs: [L, K], or [L, K, K] by the rank of the candidate before.
    """
    chain, rank = [], 0
    for depth in range(length):
        row = log_probs[depth] if log_probs.dim() == 2 else log_probs[depth, rank]
        rank = int(row.argmax())
        chain.append(int(token_ids[depth, rank]))
    return chain
