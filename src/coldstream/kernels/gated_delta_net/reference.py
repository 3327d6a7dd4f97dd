"""The gated DeltaNet mixer: a causal convolution, the gated delta rule, and a gated norm.

For one token with projections m = qkv (q and k of NK heads, v of NV heads), z, α and β, per layer:

    c      = silu(Σ_j taps[:, j] · m of the token taps − 1 − j steps back)        zeros before the start
    q, k   = the heads of c, each divided by sqrt(Σ u² + eps); q also by sqrt(d)
    g      = a · softplus(α + dt_bias) ≤ 0,   b = sigmoid(β)                        per value head
    S     ← exp(g) · S                                                             [d of k, d of v]
    δ      = b · (v − Sᵀ k)                                                        from the decayed state
    S     ← S + k δᵀ,   o = Sᵀ q                                                   output after the update
    y      = RMS norm of o, times silu(z), or sigmoid(z) in families whose gate is that

Value head h reads key head `key_head_ids[h]`. The state between tokens is S and the last taps − 1 raw rows m.

`recurrent` is the definition; `chunked` computes the same sums a chunk at a time with matrix products.
"""

import torch

from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.ops import DeltaNetInputs, DeltaNetWeights
from coldstream.kernels.rms_norm.reference import rms_norm
from coldstream.kernels.sequences import sequences


def gated_delta_net(
    inputs: DeltaNetInputs, weights: DeltaNetWeights, conv_state: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """See `Ops.gated_delta_net`. Differentiable; mutates conv_state and state."""
    num_value_heads, head_dim = state.shape[1], state.shape[-1]
    key_size = weights.num_key_heads * head_dim
    log_decay = weights.a * torch.nn.functional.softplus(inputs.alpha + weights.dt_bias, threshold=20)
    write_strength = torch.sigmoid(inputs.beta)
    outputs = [inputs.z[:0].reshape(0, num_value_heads, head_dim)]
    for state_id, part in sequences(inputs.rows):
        # Copies, because the states are overwritten while gradients may still need them.
        before = conv_state[state_id].clone()
        mixed, conv_state[state_id] = causal_conv(inputs.qkv[part], before, weights.conv_taps)
        query, key, value = (
            grouped(heads, -1, head_dim)
            for heads in torch.split(mixed, [key_size, key_size, num_value_heads * head_dim], dim=-1)
        )
        query = l2_norm(query, weights.eps)[:, weights.key_head_ids] * head_dim**-0.5
        key = l2_norm(key, weights.eps)[:, weights.key_head_ids]
        output, state[state_id] = recurrent(
            query, key, value, log_decay[part], write_strength[part], state[state_id].clone()
        )
        outputs.append(output)
    output = rms_norm(torch.cat(outputs), weights.norm, weights.eps)
    gate = torch.sigmoid if weights.output_gate == "sigmoid" else torch.nn.functional.silu
    return output.flatten(-2) * gate(inputs.z)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(Σ x² + eps) over the last dimension."""
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + eps)


def causal_conv(
    x: torch.Tensor, conv_state: torch.Tensor, taps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu of the depthwise convolution of x [L, C] after conv_state [taps − 1, C]; and the next state."""
    history = torch.cat((conv_state, x))
    num_rows, num_taps = x.shape[0], taps.shape[-1]
    mixed = sum((taps[:, j] * history[j : j + num_rows] for j in range(num_taps)), torch.zeros_like(x))
    return torch.nn.functional.silu(mixed), history[num_rows:]


def recurrent(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    write_strength: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule, token by token.

    query, key, value [L, NV, d], log_decay and write_strength [L, NV], state [NV, d, d] (key dimension
    first). Returns the outputs [L, NV, d] and the state after the last token; mutates nothing.
    """
    outputs = [value[:0]]
    for q, k, v, g, b in zip(query, key, value, log_decay, write_strength, strict=True):
        state = torch.exp(g)[:, None, None] * state
        delta = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        outputs.append(torch.einsum("hkv,hk->hv", state, q).unsqueeze(0))
    return torch.cat(outputs), state


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    write_strength: torch.Tensor,
    state: torch.Tensor,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `recurrent`, up to rounding, `chunk_size` tokens at a time."""
    outputs = [value[:0]]
    for start in range(0, query.shape[0], chunk_size):
        part = slice(start, start + chunk_size)
        output, state = advance_chunk(
            query[part].transpose(0, 1),
            key[part].transpose(0, 1),
            value[part].transpose(0, 1),
            log_decay[part].T,
            write_strength[part].T.unsqueeze(-1),
            state,
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), state


def advance_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    write_strength: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of C tokens, heads leading.

    query, key, value [NV, C, d], log_decay [NV, C], write_strength [NV, C, 1], state [NV, d, d]. Returns
    the outputs [NV, C, d] and the next state. A token's δ depends on the δ of earlier tokens in the chunk,
    through their keys' products and the decay between them: a unit lower triangular system.
    """
    size = log_decay.shape[-1]
    total_decay = log_decay.cumsum(dim=-1)  # since the start of the chunk
    between = total_decay.unsqueeze(-1) - total_decay.unsqueeze(-2)
    is_later = torch.ones(size, size, dtype=torch.bool).triu(1)
    # Masked before the exponential, which would overflow there.
    decay = torch.exp(between.masked_fill(is_later, -torch.inf))
    since_start = torch.exp(total_decay).unsqueeze(-1)
    until_end = torch.exp(total_decay[:, -1:] - total_decay).unsqueeze(-1)

    coupling = torch.tril(write_strength * (key @ key.mT) * decay, diagonal=-1)
    system = torch.eye(size, dtype=key.dtype) + coupling
    right_side = write_strength * (value - since_start * (key @ state))
    delta = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    output = since_start * (query @ state) + ((query @ key.mT) * decay) @ delta
    return output, since_start[:, -1:] * state + (until_end * key).mT @ delta
