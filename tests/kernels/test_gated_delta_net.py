"""The gated delta rule three ways, and the whole mixer in chunks and beside other sequences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.gated_delta_net.reference import (
    causal_conv,
    chunked,
    gated_delta_net,
    recurrent,
)
from coldstream.kernels.ops import DeltaNetInputs, DeltaNetWeights, Rows

NK, NV, D, TAPS, EPS = 2, 4, 4, 4, 1e-6
C = 2 * NK * D + NV * D


def rule_inputs(length: int, seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """query, key, value, log_decay, write_strength, state, with keys of length 1 as in the model."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(length, NV, D, generator=generator, dtype=dtype) for _ in range(3))
    log_decay = -torch.rand(length, NV, generator=generator, dtype=dtype) * 5
    write_strength = torch.rand(length, NV, generator=generator, dtype=dtype)
    state = torch.randn(NV, D, D, generator=generator, dtype=dtype)
    return [query, key / key.norm(dim=-1, keepdim=True), value, log_decay, write_strength, state]


def rule_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    write_strength: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule in scalars."""
    state, output = state.clone(), torch.zeros_like(value)
    for t in range(query.shape[0]):
        for h in range(NV):
            for i in range(D):
                for j in range(D):
                    state[h, i, j] *= math.exp(log_decay[t, h])
            for j in range(D):
                predicted = sum(state[h, i, j] * key[t, h, i] for i in range(D))
                delta = write_strength[t, h] * (value[t, h, j] - predicted)
                for i in range(D):
                    state[h, i, j] += key[t, h, i] * delta
                output[t, h, j] = sum(state[h, i, j] * query[t, h, i] for i in range(D))
    return output, state


def test_trap_47_chunked_recurrent_and_scalar_agree_at_16_tokens() -> None:
    inputs = rule_inputs(16, seed=47)
    expected = rule_by_hand(*inputs)
    for actual in (recurrent(*inputs), chunked(*inputs), chunked(*inputs, chunk_size=5)):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@settings(max_examples=12)
@given(length=st.integers(0, 130), chunk_size=st.sampled_from([1, 2, 63, 64]), seed=st.integers(0, 999))
def test_trap_47_chunked_equals_recurrent(length: int, chunk_size: int, seed: int) -> None:
    inputs = rule_inputs(length, seed)
    torch.testing.assert_close(
        chunked(*inputs, chunk_size=chunk_size), recurrent(*inputs), atol=1e-11, rtol=0
    )


def test_chunks_survive_total_decay() -> None:
    """exp(G_i − G_j) above the diagonal would overflow: it must be masked before the exponential."""
    inputs = rule_inputs(64, seed=1, dtype=torch.float32)
    inputs[3].fill_(-50.0)
    torch.testing.assert_close(chunked(*inputs), recurrent(*inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("function", [recurrent, chunked])
def test_gradients_of_the_rule(function) -> None:
    inputs = [x.requires_grad_() for x in rule_inputs(5, seed=2)]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_convolution_taps_and_state() -> None:
    taps = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    output, state = causal_conv(torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [6.0], [7.0]]), taps)
    raw = torch.tensor([[5.0 + 60 + 700 + 1000], [6.0 + 70 + 100 + 2000]])
    torch.testing.assert_close(output, torch.nn.functional.silu(raw))
    assert state.tolist() == [[7.0], [1.0], [2.0]]


def mixer_inputs(num_rows: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """qkv, z, alpha, beta."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_rows, n, generator=generator, dtype=dtype) for n in (C, NV * D, NV, NV)]


def mixer_weights(key_head_ids: list[int], dtype: torch.dtype = torch.float32) -> DeltaNetWeights:
    generator = torch.Generator().manual_seed(0)
    return DeltaNetWeights(
        conv_taps=torch.randn(C, TAPS, generator=generator, dtype=dtype),
        a=-torch.rand(NV, generator=generator, dtype=dtype) - 0.1,
        dt_bias=torch.randn(NV, generator=generator, dtype=dtype),
        norm=torch.randn(D, generator=generator, dtype=dtype),
        key_head_ids=torch.tensor(key_head_ids, dtype=torch.int32),
        num_key_heads=NK,
        eps=EPS,
    )


def states(state_ids: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(state_ids, TAPS - 1, C, dtype=dtype), torch.zeros(state_ids, NV, D, D, dtype=dtype)


def rows_of(*sequences: tuple[int, int, int]) -> Rows:
    positions = [p for _, start, count in sequences for p in range(start, start + count)]
    state_ids = [state_id for state_id, _, count in sequences for _ in range(count)]
    return Rows(torch.tensor(positions, dtype=torch.int32), torch.tensor(state_ids, dtype=torch.int32))


def mixer_by_hand(inputs: list[torch.Tensor], w: DeltaNetWeights) -> torch.Tensor:
    """A sequence from its start, written from the formulas head by head."""
    qkv, z, alpha, beta = inputs
    padded = torch.cat((torch.zeros(TAPS - 1, C), qkv))
    outputs = torch.zeros(qkv.shape[0], NV * D)
    state = torch.zeros(NV, D, D)
    for t in range(qkv.shape[0]):
        mixed = torch.nn.functional.silu((padded[t : t + TAPS] * w.conv_taps.T).sum(0))
        for h in range(NV):
            kappa = int(w.key_head_ids[h])
            query = mixed[kappa * D : (kappa + 1) * D]
            key = mixed[(NK + kappa) * D : (NK + kappa + 1) * D]
            value = mixed[(2 * NK + h) * D : (2 * NK + h + 1) * D]
            query = query / torch.sqrt((query**2).sum() + EPS) / math.sqrt(D)
            key = key / torch.sqrt((key**2).sum() + EPS)
            decay = torch.exp(w.a[h] * torch.log1p(torch.exp(alpha[t, h] + w.dt_bias[h])))
            state[h] *= decay
            delta = torch.sigmoid(beta[t, h]) * (value - state[h].T @ key)
            state[h] += torch.outer(key, delta)
            y = state[h].T @ query
            y = y / torch.sqrt((y**2).mean() + EPS) * w.norm
            part = slice(h * D, (h + 1) * D)
            outputs[t, part] = y * torch.nn.functional.silu(z[t, part])
    return outputs


@pytest.mark.parametrize("key_head_ids", [[0, 1, 0, 1], [0, 0, 1, 1]], ids=["tiled", "grouped"])
def test_mixer_equals_the_formulas(key_head_ids: list[int]) -> None:
    inputs, weights = mixer_inputs(9, seed=3), mixer_weights(key_head_ids)
    output = gated_delta_net(DeltaNetInputs(*inputs, rows_of((0, 0, 9))), weights, *states(1))
    torch.testing.assert_close(output, mixer_by_hand(inputs, weights), atol=1e-5, rtol=1e-4)


@settings(max_examples=20)
@given(first=st.integers(0, 9), second=st.integers(0, 9), state_id=st.integers(0, 2))
def test_chunks_and_neighbours_change_nothing(first: int, second: int, state_id: int) -> None:
    inputs, others = mixer_inputs(first + second, seed=4), mixer_inputs(2, seed=5)
    weights = mixer_weights([0, 1, 0, 1])
    whole_states, split_states = states(1), states(4)
    whole = gated_delta_net(DeltaNetInputs(*inputs, rows_of((0, 0, first + second))), weights, *whole_states)
    start = gated_delta_net(
        DeltaNetInputs(*(x[:first] for x in inputs), rows_of((state_id, 0, first))), weights, *split_states
    )
    mixed = [torch.cat((x[first:], other)) for x, other in zip(inputs, others, strict=True)]
    rows = rows_of((state_id, first, second), (3, 0, 2))
    rest = gated_delta_net(DeltaNetInputs(*mixed, rows), weights, *split_states)
    # PyTorch's products of other numbers of rows have other last bits, by the processor.
    torch.testing.assert_close(torch.cat((start, rest[:second])), whole, atol=1e-5, rtol=1e-4)
    for split, at_once in zip(split_states, whole_states, strict=True):
        torch.testing.assert_close(split[state_id], at_once[0], atol=1e-5, rtol=1e-4)


def test_trap_48_no_rows_change_nothing() -> None:
    conv_state, state = torch.ones(1, TAPS - 1, C), torch.ones(1, NV, D, D)
    weights = mixer_weights([0, 1, 0, 1])
    output = gated_delta_net(DeltaNetInputs(*mixer_inputs(0, seed=6), rows_of()), weights, conv_state, state)
    assert output.shape == (0, NV * D)
    assert (conv_state == 1).all()
    assert (state == 1).all()


def test_gradients_of_the_mixer() -> None:
    dtype = torch.float64
    inputs = [x.requires_grad_() for x in mixer_inputs(4, seed=7, dtype=dtype)]
    weights = mixer_weights([0, 1, 0, 1], dtype)

    def call(*args: torch.Tensor) -> torch.Tensor:
        inputs = DeltaNetInputs(*args, rows_of((1, 0, 3), (0, 0, 1)))
        return gated_delta_net(inputs, weights, *states(2, dtype))

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
