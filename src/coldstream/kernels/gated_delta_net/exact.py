"""The gated DeltaNet of `reference.py` to the last bit, as docs/arithmetic.md has it."""

import torch

from coldstream.kernels.arithmetic.reference import (
    constant,
    exp,
    fma,
    inverse_sqrt,
    sigmoid,
    silu,
    softplus,
    sum_of_squares,
)
from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.ops import DeltaNetInputs, DeltaNetWeights
from coldstream.kernels.rms_norm.reference import rms_norm_exact
from coldstream.kernels.sequences import sequences

NUM_CHAINS = 4


def gated_delta_net_exact(
    inputs: DeltaNetInputs, weights: DeltaNetWeights, conv_state: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """See `Ops.gated_delta_net`. Mutates conv_state and state."""
    head_dim = state.shape[-1]
    decay = exp(weights.a * softplus(inputs.alpha + weights.dt_bias))
    write_strength = sigmoid(inputs.beta)
    outputs = [inputs.z[:0].reshape(0, state.shape[1], head_dim)]
    for state_id, part in sequences(inputs.rows):
        history = torch.cat((conv_state[state_id], inputs.qkv[part]))
        conv_state[state_id] = history[inputs.qkv[part].shape[0] :]
        heads = grouped(convolve(history, weights.conv_taps), -1, head_dim)
        # Query heads first, then as many key heads, then value heads.
        value = heads[:, 2 * weights.num_key_heads :]
        query = l2_norm(heads[:, weights.key_head_ids], weights.eps) * inverse_sqrt(constant(head_dim))
        key = l2_norm(heads[:, weights.num_key_heads + weights.key_head_ids], weights.eps)
        for q, k, v, g, b in zip(query, key, value, decay[part], write_strength[part], strict=True):
            output, state[state_id] = step(q, k, v, g, b, state[state_id])
            outputs.append(output.unsqueeze(0))
    output = rms_norm_exact(torch.cat(outputs), weights.norm, weights.eps)
    gate = sigmoid if weights.output_gate == "sigmoid" else silu
    return output.flatten(-2) * gate(inputs.z)


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
    delta = write_strength[:, None] * (value - sum_of_chains(key, state))
    state = fma(key.unsqueeze(-1), delta.unsqueeze(-2), state)
    return sum_of_chains(query, state), state


def sum_of_chains(vector: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Σ_i vector_i · state_i in four chains of fma, by i mod 4: [NV, d], [NV, d, d] → [NV, d]."""
    chains = state.new_zeros(state.shape[0], NUM_CHAINS, state.shape[-1])
    for i in range(0, vector.shape[-1], NUM_CHAINS):
        keys = slice(i, i + NUM_CHAINS)
        used = chains[:, : vector[0, keys].shape[0]]
        used.copy_(fma(vector[:, keys].unsqueeze(-1), state[:, keys], used))
    c0, c1, c2, c3 = chains.unbind(1)
    return (c0 + c1) + (c2 + c3)
