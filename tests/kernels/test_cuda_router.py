"""The router on the GPU, in one launch and from given logits, against the exact reference."""

from dataclasses import replace

import pytest
import torch
from cuda_row_cases import CUDA, ROW_COUNTS, check_compiles, for_each_architecture, random, rows_apart
from guarded import Guarded
from router_cases import PUBLISHED, logits_of, rule_of
from same_bits import assert_same_bits

from coldstream.kernels.arithmetic.reference import dot_lanes
from coldstream.kernels.ops import ChoiceRule
from coldstream.kernels.router.cuda import PROGRAM, Ahead, RouterBuffers, router_choose_cuda, router_gemv_cuda
from coldstream.kernels.router.reference import choose_experts_exact


@pytest.mark.sharded(of="compiled kernels")
@for_each_architecture
def test_kernels_compile(arch: str, part_of_examples: slice) -> None:
    check_compiles(PROGRAM, arch, part_of_examples)


def check_router(tokens: int, experts: int, cols: int, ranks: int, gap: int = 0, *, times: int = 2) -> None:
    x, weight = random(tokens, tokens, cols), random(experts, experts, cols, scale=cols**-0.5)
    if experts > 4:
        weight[experts // 2] = weight[1]  # equal logits: the lower id comes first
    shared = random(7, 1, cols)
    ids, weights = choose_experts_exact(dot_lanes(x, weight), ranks)
    x_device = rows_apart(x, gap) if gap else x.to(CUDA)
    weight_device, shared_device = weight.to(CUDA), shared.to(CUDA)
    arrivals = torch.zeros(1, dtype=torch.int32, device=CUDA)
    for _ in range(times):
        outs = (
            Guarded(tokens, ranks, dtype=torch.int32, device=CUDA),
            Guarded(tokens, ranks, device=CUDA),
            Guarded(tokens, 1, device=CUDA),
            Guarded(tokens, experts, device=CUDA),
        )
        router_gemv_cuda(
            x_device, weight_device, shared_device, RouterBuffers(*(out.tensor for out in outs), arrivals)
        )
        for out, expected in zip(
            outs, (ids, weights, dot_lanes(x, shared), dot_lanes(x, weight)), strict=True
        ):
            assert_same_bits(out.checked(), expected)
        assert arrivals.item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize(("experts", "ranks"), [(256, 8), (512, 10)])
def test_full_size_router(tokens: int, experts: int, ranks: int) -> None:
    check_router(tokens, experts, 2048, ranks)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "cols", "ranks"),
    [
        (1, 16, 1),
        (2, 1, 2),
        (7, 31, 3),
        (32, 384, 4),
        (63, 100, 16),
        (300, 33, 16),
        (1024, 48, 16),
        (8, 5000, 2),
    ],
)
@pytest.mark.parametrize("gap", [0, 1, 4])
def test_router_of_any_shape(experts: int, cols: int, ranks: int, gap: int) -> None:
    for tokens in (1, 5, 8):
        check_router(tokens, experts, cols, ranks, gap)


@pytest.mark.gpu
def test_router_without_a_shared_expert() -> None:
    x, weight = random(0, 3, 64), random(1, 40, 64)
    ids, weights = choose_experts_exact(dot_lanes(x, weight), 4)
    out_ids, out_weights = Guarded(3, 4, dtype=torch.int32, device=CUDA), Guarded(3, 4, device=CUDA)
    logits, arrivals = torch.empty(3, 40, device=CUDA), torch.zeros(1, dtype=torch.int32, device=CUDA)
    router_gemv_cuda(
        x.to(CUDA),
        weight.to(CUDA),
        None,
        RouterBuffers(out_ids.tensor, out_weights.tensor, None, logits, arrivals),
    )
    assert_same_bits(out_ids.checked(), ids)
    assert_same_bits(out_weights.checked(), weights)


def check_choice(logits: torch.Tensor, ranks: int, gap: int = 0) -> None:
    ids, weights = choose_experts_exact(logits, ranks)
    tokens = len(logits)
    out_ids, out_weights = (
        Guarded(tokens, ranks, dtype=torch.int32, device=CUDA),
        Guarded(tokens, ranks, device=CUDA),
    )
    router_choose_cuda(rows_apart(logits, gap), out_ids.tensor, out_weights.tensor)
    assert_same_bits(out_ids.checked(), ids)
    assert_same_bits(out_weights.checked(), weights)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", ROW_COUNTS)
@pytest.mark.parametrize(("experts", "ranks"), [(256, 8), (512, 16), (31, 1)])
def test_choice_from_logits(tokens: int, experts: int, ranks: int) -> None:
    check_choice(random(tokens, tokens, experts, scale=3), ranks, gap=1)


@pytest.mark.gpu
def test_choice_with_ties_and_extremes() -> None:
    ties = torch.randint(-2, 3, (500, 256), generator=torch.Generator().manual_seed(0)).float()
    check_choice(ties, 16)
    check_choice(random(1, 500, 256, scale=200), 8)
    check_choice(torch.zeros(3, 512), 8)


@pytest.mark.gpu
def test_probabilities_that_tie_though_their_exponentials_differ() -> None:
    """The lowest id comes first also where only the division makes two experts equal."""
    generator = torch.Generator().manual_seed(2)
    steps = torch.randint(-40, 1, (2000, 256), generator=generator).float() * 2.0**-24
    check_choice(steps, 16)
    check_choice(steps - 80 * (torch.rand(2000, 256, generator=generator) < 0.95), 16)


@pytest.mark.gpu
def test_logits_that_are_not_finite_give_ids_of_experts() -> None:
    logits = torch.full((2, 256), torch.nan, device=CUDA)
    logits[1] = torch.inf
    ids, weights = Guarded(2, 8, dtype=torch.int32, device=CUDA), Guarded(2, 8, device=CUDA)
    router_choose_cuda(logits, ids.tensor, weights.tensor)
    assert ids.checked().tolist() == [list(range(8))] * 2
    assert weights.checked().isnan().all()


@pytest.mark.gpu
def test_more_than_it_can_do_is_refused() -> None:
    ids, weights = torch.empty(1, 17, dtype=torch.int32, device=CUDA), torch.empty(1, 17, device=CUDA)
    with pytest.raises(ValueError, match="17 of 256 experts"):
        router_choose_cuda(torch.zeros(1, 256, device=CUDA), ids, weights)
    with pytest.raises(ValueError, match="1025 experts"):
        router_choose_cuda(torch.zeros(1, 1025, device=CUDA), ids[:, :1], weights[:, :1])


def rule_on_gpu(rule: ChoiceRule) -> ChoiceRule:
    names = ("bias", "selection_bias", "expert_scale")
    vectors = {name: getattr(rule, name) for name in names if getattr(rule, name) is not None}
    return replace(rule, **{name: vector.to(CUDA) for name, vector in vectors.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["any", "ties", "near", "wide", "huge", "negative", "equal"])
@pytest.mark.parametrize(("experts", "ranks"), [(64, 6), (256, 8), (512, 16), (1024, 16)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_rule_from_logits(name: str, experts: int, ranks: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = logits_of(kind, 100, experts, generator)
    rule = rule_of(PUBLISHED[name], experts, generator, disabled=0.2)
    ids, weights = choose_experts_exact(logits, ranks, rule)
    out_ids, out_weights = (
        Guarded(100, ranks, dtype=torch.int32, device=CUDA),
        Guarded(100, ranks, device=CUDA),
    )
    router_choose_cuda(logits.to(CUDA), out_ids.tensor, out_weights.tensor, rule=rule_on_gpu(rule))
    assert_same_bits(out_ids.checked(), ids)
    assert_same_bits(out_weights.checked(), weights)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_rule_in_one_launch(name: str, tokens: int) -> None:
    """Beside a guess at a later layer's choice, twice with one counter of arrivals."""
    experts, cols, ranks = 256, 2048, 8
    generator = torch.Generator().manual_seed(tokens)
    x = random(tokens, tokens, cols)
    matrices = [random(seed, experts, cols, scale=cols**-0.5) for seed in (1, 2)]
    rules = [rule_of(PUBLISHED[name], experts, generator) for _ in matrices]
    arrivals = torch.zeros(1, dtype=torch.int32, device=CUDA)
    on_gpu = [each.to(CUDA) for each in matrices]
    for _ in range(2):
        outs = [
            (
                Guarded(tokens, ranks, dtype=torch.int32, device=CUDA),
                Guarded(tokens, ranks, device=CUDA),
                Guarded(tokens, experts, device=CUDA),
            )
            for _ in matrices
        ]
        (ids, weights, logits), (guess, guessed_weights, guessed_logits) = (
            tuple(out.tensor for out in each) for each in outs
        )
        ahead = Ahead(on_gpu[1], guess, guessed_logits, guessed_weights, rule=rule_on_gpu(rules[1]))
        buffers = RouterBuffers(ids, weights, None, logits, arrivals)
        router_gemv_cuda(x.to(CUDA), on_gpu[0], None, buffers, None, ahead, rule=rule_on_gpu(rules[0]))
        for (found_ids, found, _), matrix, rule in zip(outs, matrices, rules, strict=True):
            expected_ids, expected = choose_experts_exact(dot_lanes(x, matrix), ranks, rule)
            assert_same_bits(found_ids.checked(), expected_ids)
            assert_same_bits(found.checked(), expected)
        assert arrivals.item() == 0
