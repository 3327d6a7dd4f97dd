"""The C++ routed experts against one product after the other, for every distribution of pairs over experts.

The products themselves are held against the reference in test_cpu_linear.py.
"""

from functools import cache

import pytest
import torch
from cpu_cases import Output, same_bits
from quant_cases import VECTOR_TIERS, before_a_hole, linear, load
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.swiglu.reference import swiglu_exact

EVERY_TIER = pytest.mark.parametrize("tier", ["generic", *VECTOR_TIERS])
NUM_EXPERTS, E, F = 6, 512, 256
Types = tuple[QuantType, QuantType, QuantType]
Experts = tuple[QuantTensor, QuantTensor, QuantTensor]


@cache
def experts(gate: QuantType, up: QuantType, down: QuantType) -> Experts:
    return (
        random_weight(gate, (NUM_EXPERTS, F, E), 1),
        random_weight(up, (NUM_EXPERTS, F, E), 2),
        random_weight(down, (NUM_EXPERTS, E, F), 3),
    )


def run(runtime: _csrc.Runtime, x: torch.Tensor, ids: torch.Tensor, weights: Experts) -> torch.Tensor:
    out = Output(*ids.shape, weights[2].shape[1])
    _csrc.routed_experts(runtime, x, ids, *map(load, weights), out.rows)
    return out.checked()


def expected(x: torch.Tensor, ids: torch.Tensor, weights: Experts) -> torch.Tensor:
    generic = _csrc.Runtime(2, "generic")

    def multiply(inputs: torch.Tensor, weight: QuantTensor) -> torch.Tensor:
        return linear(generic, inputs, [load(weight)])[0]

    return routed_experts(x, ids, *weights, multiply=multiply, activate=swiglu_exact)


@cache
def expected_of(name: str, types: Types) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, ids of a distribution, and their result, which is the same for all tiers and threads."""
    ids = distributions()[name]
    x = activations(1, len(ids), E)
    return x, ids, expected(x, ids, experts(*types))


@cache
def distributions() -> dict[str, torch.Tensor]:
    """Names and int32 ids [T, K]."""
    uniform = torch.rand(70, NUM_EXPERTS, generator=torch.Generator().manual_seed(0)).argsort(dim=-1)
    skewed = torch.zeros(70, 3, dtype=torch.int64)
    skewed[::9, 1] = 4
    cases = {
        "one token": uniform[:1, :4],
        "few tokens": uniform[:5, :2],
        "many tokens": uniform[:, :3],
        "all on one expert": torch.full((140, 1), 3),
        "one each": torch.arange(NUM_EXPERTS).reshape(-1, 1),
        "the same expert in every rank": torch.full((33, 4), 5),
        "empty experts and repeated ids": skewed,
    }
    return {name: ids.int().contiguous() for name, ids in cases.items()}


@pytest.mark.sharded
@EVERY_TIER
@pytest.mark.parametrize("name", list(distributions()))
def test_kn01_every_distribution_of_pairs(tier: str, name: str) -> None:
    types = QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K
    x, ids, result = expected_of(name, types)
    for threads in (1, 2, 3):
        assert same_bits(run(_csrc.Runtime(threads, tier), x, ids, experts(*types)), result)


@pytest.mark.sharded
@EVERY_TIER
@pytest.mark.parametrize(
    "types",
    [
        (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q8_0),
        (QuantType.IQ2_XS, QuantType.IQ2_XS, QuantType.IQ3_XXS),
        (QuantType.F32, QuantType.BF16, QuantType.F16),
        (QuantType.MXFP4, QuantType.Q4_0, QuantType.Q5_0),
        (QuantType.Q8_0, QuantType.Q4_K, QuantType.Q5_0),
        (QuantType.Q6_K, QuantType.IQ4_XS, QuantType.Q4_K),
        (QuantType.IQ3_S, QuantType.Q5_K, QuantType.IQ4_NL),
    ],
    ids=str,
)
def test_experts_of_mixed_types(tier: str, types: Types) -> None:
    runtime, weights = _csrc.Runtime(2, tier), experts(*types)
    for name in ("one token", "many tokens"):
        x, ids, result = expected_of(name, types)
        assert same_bits(run(runtime, x, ids, weights), result)


@EVERY_TIER
def test_sp02_a_token_does_not_depend_on_the_batch(tier: str) -> None:
    runtime, ids = _csrc.Runtime(2, tier), distributions()["many tokens"]
    weights = experts(QuantType.Q5_K, QuantType.Q4_K, QuantType.Q5_0)
    x = activations(3, len(ids), E)
    together = run(runtime, x, ids, weights)
    for t in (0, 1, 33, 69):
        assert same_bits(together[t : t + 1], run(runtime, x[t : t + 1], ids[t : t + 1], weights))


@EVERY_TIER
def test_one_tensor_of_gate_and_up_rows(tier: str) -> None:
    """Where gate and up share a tensor, the matrices of a view lie further apart than its rows reach."""
    runtime, ids = _csrc.Runtime(2, tier), distributions()["many tokens"]
    gate, up, down = experts(QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)
    x = activations(4, len(ids), E)
    fused = load(
        QuantTensor(torch.cat((gate.blocks, up.blocks), dim=1), gate.quant_type, (NUM_EXPERTS, 2 * F, E))
    )
    out = Output(*ids.shape, E)
    _csrc.routed_experts(runtime, x, ids, fused.rows(0, F), fused.rows(F, 2 * F), load(down), out.rows)
    assert same_bits(out.checked(), run(runtime, x, ids, (gate, up, down)))


@pytest.mark.sharded
@EVERY_TIER
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_trap_04_pairs_that_somebody_else_computes_are_left_alone(tier: str, share: float) -> None:
    runtime, weights = _csrc.Runtime(2, tier), experts(QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)
    for name in ("one token", "many tokens", "all on one expert"):
        ids = distributions()[name]
        x = activations(8, len(ids), E)
        elsewhere = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < share
        out = torch.full((*ids.shape, E), 7.0)
        _csrc.routed_experts(runtime, x, ids.masked_fill(elsewhere, -1), *map(load, weights), out)
        all_of_them = run(runtime, x, ids, weights)
        assert same_bits(out[~elsewhere], all_of_them[~elsewhere])
        assert bool((out[elsewhere] == 7.0).all())


@EVERY_TIER
@pytest.mark.parametrize("bad", [-2, NUM_EXPERTS, 2**31 - 1, -(2**31)])
def test_hostile_ids_are_refused(tier: str, bad: int) -> None:
    types = QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K
    runtime, weights = _csrc.Runtime(2, tier), experts(*types)
    x, usual_ids, result = expected_of("many tokens", types)
    ids = usual_ids.clone()
    ids[68, 2] = bad
    out = torch.zeros(*ids.shape, E)
    with pytest.raises(ValueError, match="an expert id lies outside the experts"):
        _csrc.routed_experts(runtime, x, ids, *map(load, weights), out)
    assert not out.any()
    assert same_bits(run(runtime, x, usual_ids, weights), result)  # the runtime is still usable


@EVERY_TIER
def test_trap_06_strided_topk(tier: str) -> None:
    """Ids that are columns of a wider tensor are read with their stride."""
    wide = torch.full((40, 9), -1, dtype=torch.int32)
    wide[:, 2:5] = distributions()["many tokens"][:40]
    weights = experts(QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)
    runtime, x = _csrc.Runtime(2, tier), activations(6, 40, E)
    assert same_bits(
        run(runtime, x, wide[:, 2:5], weights), run(runtime, x, wide[:, 2:5].contiguous(), weights)
    )


@EVERY_TIER
def test_nothing_is_read_beyond_the_last_expert(tier: str) -> None:
    ids = torch.full((17, 1), NUM_EXPERTS - 1, dtype=torch.int32)
    weights = experts(QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K)
    guarded = tuple(QuantTensor(before_a_hole(w.blocks), w.quant_type, w.shape) for w in weights)
    runtime, x = _csrc.Runtime(1, tier), activations(7, 17, E)
    for rows in (1, 17):
        actual = run(runtime, before_a_hole(x[:rows]), before_a_hole(ids[:rows]), guarded)
        assert same_bits(actual, run(runtime, x[:rows], ids[:rows], weights))


@EVERY_TIER
def test_a_graph_runs_with_fewer_rows(tier: str) -> None:
    types = QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K
    x, ids, result = expected_of("many tokens", types)
    runtime, weights, out = _csrc.Runtime(2, tier), experts(*types), torch.empty(*ids.shape, E)
    runtime.begin_capture(len(ids))
    _csrc.routed_experts(runtime, x, ids, *map(load, weights), out)
    graph = runtime.end_capture()
    for rows in (1, 9, len(ids)):
        out.fill_(torch.nan)
        graph.run(rows)
        assert same_bits(out[:rows], result[:rows])
        assert out[rows:].isnan().all()


def test_bad_arguments_are_named() -> None:
    runtime = _csrc.Runtime(1)
    gate, up, down = map(load, experts(QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K))
    x, ids, out = torch.zeros(2, E), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, E)
    with pytest.raises(ValueError, match="do not belong together"):
        _csrc.routed_experts(runtime, x, ids, gate, down, up, out)
    with pytest.raises(ValueError, match=r"x has shape"):
        _csrc.routed_experts(runtime, torch.zeros(2, F), ids, gate, up, down, out)
    with pytest.raises(ValueError, match=r"out must have shape \[2, 3, 512\]"):
        _csrc.routed_experts(runtime, x, ids, gate, up, down, torch.zeros(2, 2, E))
    with pytest.raises(ValueError, match=r"topk_ids has shape"):
        _csrc.routed_experts(runtime, x, ids[:1], gate, up, down, out)
    with pytest.raises(TypeError):
        _csrc.routed_experts(runtime, x, ids.long(), gate, up, down, out)
