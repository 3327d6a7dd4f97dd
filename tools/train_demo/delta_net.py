"""The gated delta rule, twice: token by token (its meaning) and in chunks (what training runs).

Both take `q, k, v [B, T, H, d]`, the log decay `g [B, T, H]` (≤ 0) and the write strength `beta [B, T, H]`,
all float32, with q and k already normalised and q scaled, and return `[B, T, H, d]`. The state starts at
zero.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK = 64


def delta_rule_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token after the other: decay, predict, correct, read."""
    B, T, H, d = q.shape
    state = q.new_zeros(B, H, d, d)  # key by value
    outputs = []
    for t in range(T):
        state = state * g[:, t].exp()[..., None, None]
        predicted = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        delta = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + k[:, t, :, :, None] * delta[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1)


class _InverseOfUnitLower(torch.autograd.Function):
    """`(I + A)^-1` for strictly lower triangular `A [..., C, C]`, C a power of two, by merging blocks."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        C = a.shape[-1]
        index = torch.arange(C, device=a.device)
        inverse = torch.eye(C, device=a.device, dtype=a.dtype).expand_as(a)
        size = 1
        while size < C:
            block = index // size
            corner = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
            step = a * corner
            inverse = inverse - (step if size == 1 else inverse @ (step @ inverse))
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ (grads[0] @ transposed)).tril(-1)


def delta_rule_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same result with matrix products over chunks of `CHUNK` tokens; T must be a multiple of it."""
    B, T, H, d = q.shape
    C, n = CHUNK, T // CHUNK

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [n, B * H, C, ...]
        x = x.reshape(B, n, C, H, *x.shape[3:]).transpose(2, 3).transpose(0, 1)
        return x.reshape(n, B * H, C, *x.shape[4:])

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta)[..., None]
    total = g.cumsum(-1)
    causal = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    # The mask comes before exp: above the diagonal the difference is positive and may overflow.
    decay = torch.where(causal, total[..., :, None] - total[..., None, :], -torch.inf).exp()
    from_start = total.exp()[..., None]
    k_transposed = k.transpose(-1, -2)
    inverse = _InverseOfUnitLower.apply((beta * (k @ k_transposed) * decay).tril(-1))
    u = inverse @ (beta * v)
    w = inverse @ (beta * from_start * k)
    to_end = (total[..., -1:] - total).exp()[..., None]
    k_end = (to_end * k).transpose(-1, -2)
    chunk_decay = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(B * H, d, d)
    states, corrected = [], []
    for c in range(n):
        states.append(state)
        corrected.append(torch.baddbmm(u[c], w[c], state, alpha=-1))
        state = torch.baddbmm(chunk_decay[c] * state, k_end[c], corrected[c])
    out = (from_start * q) @ torch.stack(states) + ((q @ k_transposed) * decay) @ torch.stack(corrected)
    out = out.reshape(n, B, H, C, d).transpose(0, 1).transpose(2, 3)
    return out.reshape(B, T, H, d)
