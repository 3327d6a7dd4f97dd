"""Heads of every kind: near plain softmax attention, and on every tier the definition's bits."""

import pytest
import torch
from attention_batches import BatchCase, Kind, Part, some_kinds, some_parts
from cpu_cases import run_everywhere, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels import _csrc
from coldstream.kernels.attention.reference import attention
from coldstream.kernels.rope.reference import rotate

WINDOWS = (None, None, 1, 9)


def plain_attention(case: BatchCase) -> torch.Tensor:
    """Softmax attention [T, H · D] of one chain from position 0, in float64, without a cache."""
    inputs, heads, (num_heads, num_kv_heads, head_dim) = case.inputs(), case.layer(), case.heads
    num_rows, angles, gate_kind = len(inputs.key), inputs.angles.double(), case.kind.output_gate

    def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            x, (head_dim,), None if weight is None else weight.double(), heads.eps
        )

    query, gate = inputs.query_gate.double().view(num_rows, num_heads, -1), inputs.gate
    if gate_kind == "query":
        query, gate = query[..., :head_dim], query[..., head_dim:]
    key, value = (x.double().view(num_rows, num_kv_heads, head_dim) for x in (inputs.key, inputs.value))
    if case.kind.has_biases:
        query = query + heads.q_bias.double().view(num_heads, head_dim)
        key = key + heads.k_bias.double().view(num_kv_heads, head_dim)
        value = value + heads.v_bias.double().view(num_kv_heads, head_dim)
    if case.kind.has_norms:
        query, key = normed(query, heads.q_norm), normed(key, heads.k_norm)
    value = normed(value, None) if case.kind.v_norm else value
    query, key = rotate(query, angles), rotate(key, angles)
    key, value = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (key, value))
    distance = torch.arange(num_rows).unsqueeze(-1) - torch.arange(num_rows)
    is_seen = (distance >= 0) & (distance < (num_rows if case.window is None else case.window))
    scores = torch.einsum("qhd,khd->hqk", query, key)
    scores = scores / head_dim**0.5 if case.kind.scale is None else scores * case.kind.scale
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.double().view(-1, 1, 1).expand(-1, num_rows, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_rows]
    output = torch.einsum("hqk,khd->qhd", weights, value)
    if gate_kind == "query":
        output = output * torch.sigmoid(gate)
    elif gate_kind != "none":
        output = output * torch.nn.functional.softplus(gate.double().view(num_rows, num_heads, -1))
    return output.flatten(1)


@pytest.mark.parametrize(("cache_name", "tolerance"), [("f32", 1e-5), ("i16", 2e-3), ("i8", 0.2)])
@settings(max_examples=15)
@given(st.integers(1, 40), some_kinds(), st.sampled_from(WINDOWS), st.integers(0, 99))
def test_both_definitions_are_near_plain_softmax_attention(
    cache_name: str, tolerance: float, num_rows: int, kind: Kind, window: int | None, seed: int
) -> None:
    case = BatchCase([Part(0, num_rows)], cache_name, (4, 2, 32), window, seed, kind=kind)
    expected = plain_attention(case)
    exact, *_ = case.expected()
    floats = attention(case.inputs(), case.layer(), case.caches(), case.rows())
    for found in (exact, floats):
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("cache_name", ["i16", "i8"])
@pytest.mark.parametrize("heads", [(8, 1, 64), (2, 1, 512)])
def test_heads_of_64_and_512_have_the_bits_of_the_definition(
    runtimes: list[_csrc.Runtime], cache_name: str, heads: tuple[int, int, int]
) -> None:
    """Those of gpt-oss, and of gemma4's layers without a window."""
    kind = Kind(output_gate="none", scale=1.0, v_norm=True, has_sinks=True)
    for parts in ([Part(250, 12)], [Part(70, 1), Part(63, 5, (-1, 0, 0, 2, 1))]):
        case = BatchCase(parts, cache_name, heads, None, 3, kind=kind)
        found = run_everywhere(case.on_cpu, runtimes)
        assert all(same_bits(a, b) for a, b in zip(case.expected(), found, strict=True))


@pytest.mark.sharded
@pytest.mark.parametrize("cache_name", ["f16", "f32"])
def test_over_floats_they_have_the_bits_of_the_definition(
    runtimes: list[_csrc.Runtime], cache_name: str
) -> None:
    @settings(max_examples=8)
    @given(some_parts(), some_kinds(), st.sampled_from([None, None, 1, 60, 300]), st.integers(0, 99))
    def check_all(parts: list[Part], kind: Kind, window: int | None, seed: int) -> None:
        case = BatchCase(parts, cache_name, (4, 2, 16), window, seed, kind=kind)
        found = run_everywhere(case.on_cpu, runtimes)
        assert all(same_bits(a, b) for a, b in zip(case.expected(), found, strict=True))

    check_all()
