"""The gated DeltaNet of `reference.py` to the last bit, as docs/arithmetic.md has it."""

import ctypes

import torch

from coldstream.kernels.arithmetic.reference import (
    constant,
    exp,
    fma,
    inverse_sqrt,
    sigmoid,
    silu,
    sum_of_squares,
)
from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.ops import DeltaNetWeights, Rows
from coldstream.kernels.rms_norm.reference import rms_norm_exact
from coldstream.kernels.sequences import sequences

SOFTPLUS_IS_LINEAR = 20.0


def gated_delta_net_exact(
    qkv: torch.Tensor,
    z: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    weights: DeltaNetWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """See `Ops.gated_delta_net`. Mutates conv_state and state."""
    head_dim = state.shape[-1]
    decay = exp(weights.a * softplus(alpha + weights.dt_bias))
    write_strength = sigmoid(beta)
    outputs = [z[:0].reshape(0, state.shape[1], head_dim)]
    for slot, part in sequences(rows):
        history = torch.cat((conv_state[slot], qkv[part]))
        conv_state[slot] = history[qkv[part].shape[0] :]
        heads = grouped(convolve(history, weights.conv_taps), -1, head_dim)
        # Query heads first, then as many key heads, then value heads.
        value = heads[:, 2 * weights.num_key_heads :]
        query = l2_norm(heads[:, weights.key_head_ids], weights.eps) * inverse_sqrt(constant(head_dim))
        key = l2_norm(heads[:, weights.num_key_heads + weights.key_head_ids], weights.eps)
        for q, k, v, g, b in zip(query, key, value, decay[part], write_strength[part], strict=True):
            output, state[slot] = step(q, k, v, g, b, state[slot])
            outputs.append(output.unsqueeze(0))
    output = rms_norm_exact(torch.cat(outputs), weights.norm, weights.eps)
    return output.flatten(-2) * silu(z)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), by the C library's log1p: those of numpy and PyTorch differ from it in last bits."""
    log1p = ctypes.CDLL(None).log1pf
    log1p.restype, log1p.argtypes = ctypes.c_float, [ctypes.c_float]
    logarithms = torch.tensor([log1p(value) for value in exp(x).flatten().tolist()]).reshape(x.shape)
    return torch.where(x > SOFTPLUS_IS_LINEAR, x, logarithms)


def convolve(history: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """silu of the convolution of history [taps − 1 + L, C] with taps [C, taps], oldest first: [L, C]."""
    num_taps = taps.shape[-1]
    num_rows = history.shape[0] - num_taps + 1
    total = torch.zeros(num_rows, history.shape[-1])
    for j in range(num_taps):
        total = fma(taps[:, j], history[j : j + num_rows], total)
    return silu(total)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x · (1 / sqrt(Σ x² + eps)) over the last dimension."""
    return x * inverse_sqrt(sum_of_squares(x) + constant(eps)).unsqueeze(-1)


def step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    write_strength: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: query, key, value [NV, d], decay and write_strength [NV], state [NV, d, d].

    Returns the output [NV, d] and the next state; mutates nothing.
    """
    state = state * decay[:, None, None]
    delta = write_strength[:, None] * (value - two_chains(key, state))
    state = fma(key.unsqueeze(-1), delta.unsqueeze(-2), state)
    return two_chains(query, state), state


def two_chains(vector: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Σ_i vector_i · state_i in two chains of fma, even and odd i: [NV, d], [NV, d, d] → [NV, d]."""
    chains = [torch.zeros_like(vector), torch.zeros_like(vector)]
    for i in range(vector.shape[-1]):
        chains[i % 2] = fma(vector[:, i : i + 1], state[:, i], chains[i % 2])
    return chains[0] + chains[1]
