"""Layers on the reference operations, against their formulas."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from coldstream.kernels.ops import (
    AttentionHeads,
    AttentionInputs,
    Caches,
    DeltaNetInputs,
    DeltaNetWeights,
    ExpertWeights,
    FfnWeights,
    OutputGate,
    RopeSpec,
    RouterWeights,
    Rows,
)
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.layers.attention import AttentionWeights, attention, project_attention
from coldstream.layers.gated_delta_net import GatedDeltaNetWeights, gated_delta_net, project_gated_delta_net
from coldstream.layers.moe import MoeWeights, moe

E, F, SHARED_F, EXPERTS, K = 6, 5, 7, 4, 2
H, G, D = 4, 2, 2
NK, NV, d, TAPS = 1, 2, 3, 4


def matrices(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def rows_of(count: int) -> Rows:
    return Rows(torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))


def ffn(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def moe_weights(seed: int = 0) -> MoeWeights:
    shapes = [(EXPERTS, E), (1, E), (EXPERTS, F, E), (EXPERTS, F, E), (EXPERTS, E, F)]
    router, shared_gate, *stacks = matrices(*shapes, (SHARED_F, E), (SHARED_F, E), (E, SHARED_F), seed=seed)
    return MoeWeights(RouterWeights(router, shared_gate, K), ExpertWeights(*stacks))


def run_moe(x: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
    """What the layer adds to the residual stream."""
    ops = ReferenceOps()
    return ops.add_norm(torch.zeros_like(x), moe(ops, x, weights), torch.ones(E), 0.0)[0]


def moe_by_hand(x: torch.Tensor, w: MoeWeights) -> torch.Tensor:
    """One token [E] at a time."""
    experts = w.experts
    probabilities = torch.softmax(w.router.gate @ x, 0)
    values, ids = probabilities.topk(K)
    total = torch.zeros(E)
    for weight, expert in zip(values / values.sum(), ids.tolist(), strict=True):
        total += weight * ffn(x, experts.gate[expert], experts.up[expert], experts.down[expert])
    if w.router.shared_gate is None:
        return total
    gate = torch.sigmoid(w.router.shared_gate[0] @ x)
    return total + gate * ffn(x, experts.shared_gate, experts.shared_up, experts.shared_down)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 9])
@pytest.mark.parametrize("exact_shared_gate", [0.0, 60.0, -60.0], ids=["mixed", "open", "closed"])
def test_trap_02_moe_equals_the_formula_for_every_token(num_tokens: int, exact_shared_gate: float) -> None:
    """The shared expert's gate is one number a token, applied once, whatever else the token does."""
    weights = moe_weights()
    (x,) = matrices((num_tokens, E), seed=1)
    if exact_shared_gate:
        x[:, 0] = 1.0
        weights.router.shared_gate.zero_()[0, 0] = exact_shared_gate
    expected = torch.stack([moe_by_hand(row, weights) for row in x])
    torch.testing.assert_close(run_moe(x, weights), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_moe_without_a_shared_expert_is_its_routed_part(num_tokens: int) -> None:
    gated = moe_weights()
    routed = ExpertWeights(gated.experts.gate, gated.experts.up, gated.experts.down)
    weights = MoeWeights(replace(gated.router, shared_gate=None), routed)
    (x,) = matrices((num_tokens, E), seed=1)
    expected = torch.stack([moe_by_hand(row, weights) for row in x])
    torch.testing.assert_close(run_moe(x, weights), expected, atol=1e-4, rtol=1e-4)


def test_trap_01_routing_weights_do_not_scale_the_output() -> None:
    """With equal experts the routed part is one expert's output, and not a few percent of it."""
    weights = moe_weights()
    experts = weights.experts
    for stack in (experts.gate, experts.up, experts.down):
        stack.copy_(stack[:1].expand_as(stack))
    experts.shared_down.zero_()
    (x,) = matrices((3, E), seed=2)
    expected = ffn(x, experts.gate[0], experts.up[0], experts.down[0])
    torch.testing.assert_close(run_moe(x, weights), expected, atol=1e-4, rtol=1e-4)


def test_dense_ffn() -> None:
    gate, up, down, x = matrices((F, E), (F, E), (E, F), (3, E))
    expected = ffn(x, gate, up, down)
    torch.testing.assert_close(ReferenceOps().ffn(x, FfnWeights(gate, up, down)), expected)


@pytest.mark.parametrize("output_gate", get_args(OutputGate))
@pytest.mark.parametrize("window", [None, 2])
def test_attention_joins_its_projections(output_gate: OutputGate, window: int | None) -> None:
    ops = ReferenceOps()
    query_rows, gate_rows = (
        H * D * (2 if output_gate == "query" else 1),
        H * (D if output_gate == "element" else 1),
    )
    q, k, v, out, q_norm, k_norm, x, gate = matrices(
        (query_rows, E), (G * D, E), (G * D, E), (E, H * D), (D,), (D,), (5, E), (gate_rows, E)
    )
    attn_gate = gate if output_gate in ("head", "element") else None
    angles = torch.stack((torch.ones(5, 1), torch.zeros(5, 1)), dim=-1)
    caches = [torch.full((1, 5, G, D), torch.nan) for _ in range(4)]
    heads = AttentionHeads(q_norm, k_norm, 1e-6, output_gate, window)
    weights = AttentionWeights(q, k, v, out, heads, RopeSpec(2, 1e4), attn_gate)
    actual = attention(
        ops, project_attention(ops, x, weights, angles), weights, Caches(*caches[:2]), rows_of(5)
    )
    inputs = AttentionInputs(x @ q.T, x @ k.T, x @ v.T, angles, None if attn_gate is None else x @ gate.T)
    mixed = ops.attention(inputs, heads, Caches(*caches[2:]), rows_of(5))
    torch.testing.assert_close(actual, mixed @ out.T)
    torch.testing.assert_close(caches[0], caches[2])
    torch.testing.assert_close(caches[1], (x @ v.T).reshape(1, 5, G, D))


def test_the_output_of_attention_may_have_a_bias() -> None:
    q, k, v, out, x, bias = matrices((H * D, E), (G * D, E), (G * D, E), (E, H * D), (5, E), (E,))
    heads = AttentionHeads(torch.ones(D), torch.ones(D), 1e-6, "none")
    ops, angles = ReferenceOps(), torch.stack((torch.ones(5, 1), torch.zeros(5, 1)), dim=-1)
    plain = AttentionWeights(q, k, v, out, heads, RopeSpec(2, 1e4))
    found = []
    for weights in (plain, replace(plain, output_bias=bias)):
        caches = Caches(*(torch.full((1, 5, G, D), torch.nan) for _ in "kv"))
        found.append(attention(ops, project_attention(ops, x, weights, angles), weights, caches, rows_of(5)))
    assert torch.equal(found[1].values, found[0])
    assert found[1].bias is bias


def test_values_without_a_projection_are_the_raw_keys() -> None:
    q, k, out, x = matrices((H * D, E), (G * D, E), (E, H * D), (5, E))
    heads = AttentionHeads(torch.ones(D), torch.ones(D), 1e-6, "none")
    weights = AttentionWeights(q, k, None, out, heads, RopeSpec(2, 1e4))
    inputs = project_attention(ReferenceOps(), x, weights, torch.ones(5, 1, 2))
    torch.testing.assert_close(inputs.key, x @ k.T)
    torch.testing.assert_close(inputs.value, x @ k.T)
    assert inputs.gate is None


def test_gated_delta_net_joins_its_projections() -> None:
    ops = ReferenceOps()
    channels = 2 * NK * d + NV * d
    qkv, gate, alpha, beta, out, x = matrices(
        (channels, E), (NV * d, E), (NV, E), (NV, E), (E, NV * d), (5, E)
    )
    taps, dt_bias, norm = matrices((channels, TAPS), (NV,), (d,), seed=3)
    key_head_ids = torch.zeros(NV, dtype=torch.int32)
    rule = DeltaNetWeights(taps, -torch.ones(NV), dt_bias, norm, key_head_ids, NK, 1e-6)
    states = [(torch.zeros(1, TAPS - 1, channels), torch.zeros(1, NV, d, d)) for _ in range(2)]
    weights = GatedDeltaNetWeights(qkv, gate, alpha, beta, out, rule)
    actual = gated_delta_net(ops, project_gated_delta_net(ops, x, weights, rows_of(5)), weights, *states[0])
    inputs = DeltaNetInputs(x @ qkv.T, x @ gate.T, x @ alpha.T, x @ beta.T, rows_of(5))
    mixed = ops.gated_delta_net(inputs, rule, *states[1])
    torch.testing.assert_close(actual, mixed @ out.T)
    torch.testing.assert_close(states[0], states[1])
    assert states[0][1].abs().sum() > 0
