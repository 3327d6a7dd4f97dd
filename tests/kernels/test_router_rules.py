"""Every rule by which a router chooses: what it means, and the same bits on each tier and on a GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_cases import Results, run_everywhere
from guarded import Guarded
from hypothesis import given, settings
from router_cases import PUBLISHED, choices, logits_of, meant, rule_of
from same_bits import assert_same_bits
from test_host_router import CPU, Outputs

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.arithmetic.reference import dot_lanes, empty_activations
from coldstream.kernels.ops import ChoiceRule, RouterSpec
from coldstream.kernels.rms_norm.reference import rms_norm_exact
from coldstream.kernels.router.cuda import (
    Ahead,
    NormBefore,
    RouterBuffers,
    router_choose_cuda,
    router_gemv_cuda,
)
from coldstream.kernels.router.reference import choose_experts, choose_experts_exact

EXPERTS, RANKS = 64, 6


def example(spec: RouterSpec) -> tuple[torch.Tensor, ChoiceRule]:
    generator = torch.Generator().manual_seed(1)
    return logits_of("any", 20, EXPERTS, generator), rule_of(spec, EXPERTS, generator)


@pytest.mark.parametrize("choose", [choose_experts, choose_experts_exact])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rules_mean_what_they_should(choose: Any, name: str) -> None:
    logits, rule = example(PUBLISHED[name])
    ids, weights = choose(logits, RANKS, rule)
    for row, (found_ids, found) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        expected_ids, expected = meant(logits[row], RANKS, rule)
        assert found_ids == expected_ids
        np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("laguna", {"gating": "softmax"}),
        ("laguna", {"selection_bias": False}),
        ("laguna", {"normalised": False}),
        ("laguna", {"scale": 1.0}),
        ("gpt-oss", {"gating": "softmax", "normalised": False}),
        ("gpt-oss", {"bias": False}),
        ("qwen2moe", {"normalised": True}),
        ("deepseek-v3", {"num_groups": 1, "num_used_groups": 1}),
        ("deepseek-v3", {"num_used_groups": 3}),
        ("deepseek-v4", {"gating": "sigmoid"}),
        ("gemma4", {"expert_scale": False}),
    ],
)
def test_every_property_changes_a_choice(name: str, changes: dict[str, Any]) -> None:
    """So that the comparison above, and those below, fail without it."""
    logits, rule = example(PUBLISHED[name])
    other = replace(rule, spec=replace(rule.spec, **changes))
    dropped = {field: None for field in ("bias", "selection_bias", "expert_scale") if field in changes}
    other = replace(other, **dropped)
    one, another = (choose_experts_exact(logits, RANKS, each) for each in (rule, other))
    assert not torch.allclose(one[1], another[1], rtol=1e-3) or not torch.equal(one[0], another[0])


def test_biases_choose_but_do_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    rule = ChoiceRule(
        RouterSpec("sigmoid", selection_bias=True), None, torch.tensor([5.0, 4.0, 0.0, -torch.inf])
    )
    ids, weights = choose_experts_exact(logits, 3, rule)
    p = logits[0].sigmoid()
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights[0], p[:3] / p[:3].sum())


def test_small_scores_still_make_weights_of_sum_one() -> None:
    """llama.cpp would divide by 2^-14 here, and the checkpoint's code does not."""
    ids, weights = choose_experts_exact(torch.full((1, 8), -20.0), 4, ChoiceRule(RouterSpec("sigmoid")))
    assert ids.tolist() == [[0, 1, 2, 3]]
    torch.testing.assert_close(weights, torch.full((1, 4), 0.25))


def on_a_cpu(runtime: _csrc.Runtime, logits: torch.Tensor, ranks: int, rule: ChoiceRule) -> Results:
    """Row by row, as products with a matrix of one column."""
    ids, weights = (
        torch.full((len(logits), ranks), -1, dtype=torch.int32),
        torch.full((len(logits), ranks), torch.nan),
    )
    for row, values in enumerate(logits):
        data = values.clone().view(torch.uint8)
        weight = _csrc.Weight.from_array(data, int(QuantType.F32), len(values), 1)
        _csrc.router(runtime, torch.ones(1, 1), weight, ids[row : row + 1], weights[row : row + 1], rule)
    return ids, weights


@pytest.mark.sharded(of="kernels")
@given(drawn=choices())
@settings(max_examples=100)
def test_all_tiers_choose_alike(
    runtimes: list[_csrc.Runtime], drawn: tuple[torch.Tensor, int, ChoiceRule]
) -> None:
    logits, ranks, rule = drawn
    ids, weights = run_everywhere(lambda runtime: on_a_cpu(runtime, logits, ranks, rule), runtimes[:-4])
    expected_ids, expected = choose_experts_exact(logits, ranks, rule)
    assert_same_bits(ids, expected_ids)
    assert_same_bits(weights, expected)


def test_rows_side_by_side_on_several_threads(runtimes: list[_csrc.Runtime]) -> None:
    """A row's memory for scores and groups is its own."""
    generator = torch.Generator().manual_seed(3)
    x, matrix = torch.randn(70, 24, generator=generator), torch.randn(EXPERTS, 24, generator=generator)
    rule = rule_of(PUBLISHED["deepseek-v3"], EXPERTS, generator)
    weight = _csrc.Weight.from_array(matrix.view(torch.uint8).flatten(), int(QuantType.F32), EXPERTS, 24)

    def route(runtime: _csrc.Runtime) -> Results:
        ids, weights = torch.zeros(70, RANKS, dtype=torch.int32), torch.zeros(70, RANKS)
        _csrc.router(runtime, x, weight, ids, weights, rule)
        return ids, weights

    found = run_everywhere(route, runtimes)
    for one, other in zip(found, choose_experts_exact(dot_lanes(x, matrix), RANKS, rule), strict=True):
        assert_same_bits(one, other)


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@given(drawn=choices())
@settings(max_examples=60)
def test_a_gpu_chooses_alike(drawn: tuple[torch.Tensor, int, ChoiceRule]) -> None:
    logits, ranks, rule = drawn
    ids, weights = choose_experts_exact(logits, ranks, rule)
    out_ids = Guarded(len(logits), ranks, dtype=torch.int32, device=CPU)
    out_weights = Guarded(len(logits), ranks, device=CPU)
    router_choose_cuda(logits, out_ids.tensor, out_weights.tensor, rule=rule)
    assert_same_bits(out_ids.checked(), ids)
    assert_same_bits(out_weights.checked(), weights)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_single_launch_and_its_guess_have_rules_of_their_own(name: str, tokens: int) -> None:
    """The later layer's vectors are not this layer's."""
    generator = torch.Generator().manual_seed(tokens)
    cols = 48
    x = torch.randn(tokens, cols, generator=generator)
    weight, later = (torch.randn(EXPERTS, cols, generator=generator) for _ in range(2))
    rules = [rule_of(PUBLISHED[name], EXPERTS, generator) for _ in range(2)]
    outs, guesses = (Outputs(tokens, RANKS, EXPERTS) for _ in range(2))
    ahead = Ahead(later, guesses.ids.tensor, guesses.logits.tensor, guesses.weights.tensor, rule=rules[1])
    buffers = RouterBuffers(*outs.tensors[:2], None, outs.tensors[3], torch.zeros(1, dtype=torch.int32))
    router_gemv_cuda(x, weight, None, buffers, None, ahead, rule=rules[0])
    for found, matrix, rule in zip((outs, guesses), (weight, later), rules, strict=True):
        ids, weights = choose_experts_exact(dot_lanes(x, matrix), RANKS, rule)
        assert_same_bits(found.ids.checked(), ids)
        assert_same_bits(found.weights.checked(), weights)


@pytest.mark.usefixtures("host")
def test_a_norm_before_a_rule() -> None:
    """The launch that norms its rows itself chooses by the same rule."""
    tokens, cols = 2, 256
    generator = torch.Generator().manual_seed(5)
    x, update = (torch.randn(tokens, cols, generator=generator) for _ in range(2))
    norm_weight, weight = (
        torch.randn(cols, generator=generator),
        torch.randn(EXPERTS, cols, generator=generator),
    )
    rule = rule_of(PUBLISHED["laguna"], EXPERTS, generator)
    codes, normed, total = (
        empty_activations(tokens, cols, CPU),
        torch.empty(tokens, cols),
        torch.empty(tokens, cols),
    )
    norm = NormBefore(x, update, total, norm_weight, 1e-6, codes)
    outs = Outputs(tokens, RANKS, EXPERTS)
    buffers = RouterBuffers(*outs.tensors[:2], None, outs.tensors[3], torch.zeros(1, dtype=torch.int32))
    router_gemv_cuda(normed, weight, None, buffers, norm=norm, rule=rule)
    assert_same_bits(normed, rms_norm_exact(x + update, norm_weight, 1e-6))
    ids, weights = choose_experts_exact(dot_lanes(normed, weight), RANKS, rule)
    assert_same_bits(outs.ids.checked(), ids)
    assert_same_bits(outs.weights.checked(), weights)


@pytest.mark.usefixtures("host")
def test_a_layer_ahead_of_another_kind_is_refused() -> None:
    x, weight = torch.zeros(1, 16), torch.zeros(EXPERTS, 16)
    outs, guesses = (Outputs(1, RANKS, EXPERTS) for _ in range(2))
    rule = rule_of(PUBLISHED["laguna"], EXPERTS, torch.Generator())
    ahead = Ahead(weight, guesses.ids.tensor, guesses.logits.tensor, guesses.weights.tensor, rule=rule)
    buffers = RouterBuffers(*outs.tensors[:2], None, outs.tensors[3], torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="another kind of rule"):
        router_gemv_cuda(x, weight, None, buffers, None, ahead)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_that_are_no_numbers_give_ids_of_experts(name: str, fastest: _csrc.Runtime) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = logits_of("any", 4, EXPERTS, generator)
    logits[0], logits[1], logits[2, 5], logits[3, 6] = torch.nan, torch.inf, torch.nan, torch.inf
    rule = rule_of(PUBLISHED[name], EXPERTS, generator, disabled=0.2)
    ids, weights = Guarded(4, RANKS, dtype=torch.int32, device=CPU), Guarded(4, RANKS, device=CPU)
    router_choose_cuda(logits, ids.tensor, weights.tensor, rule=rule)
    for row in (*ids.checked().tolist(), *on_a_cpu(fastest, logits, RANKS, rule)[0].tolist()):
        assert len(set(row)) == RANKS
        assert set(row) <= set(range(EXPERTS))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("spec", "size", "message"),
    [
        (RouterSpec(num_groups=3), 0, "64 experts in 3 groups"),
        (RouterSpec(num_groups=64), 0, "64 experts in 64 groups"),
        (RouterSpec(num_groups=4, num_used_groups=5), 0, "of which 5 are used"),
        (RouterSpec(num_groups=0), 0, "64 experts in 0 groups"),
        (RouterSpec(selection_bias=True), 63, "selection_bias"),
    ],
)
def test_rules_for_other_experts_are_refused(
    fastest: _csrc.Runtime, spec: RouterSpec, size: int, message: str
) -> None:
    rule = ChoiceRule(spec, selection_bias=torch.zeros(size) if size else None)
    ids, weights = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        router_choose_cuda(torch.zeros(1, EXPERTS), ids, weights, rule=rule)
    with pytest.raises(ValueError, match=message):
        on_a_cpu(fastest, torch.zeros(1, EXPERTS), 2, rule)
