"""Router, routed experts and their combination, with the traps of the known failures by name."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_blocks import random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic import reference as exact_arithmetic
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.experts.reference import combine_experts, routed_experts
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.router.reference import check_topk_ids, choose_experts
from coldstream.kernels.swiglu.reference import swiglu, swiglu_exact

NUM_EXPERTS, E, F = 6, 8, 5


def stacks(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(NUM_EXPERTS, F, E), (NUM_EXPERTS, F, E), (NUM_EXPERTS, E, F)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def random_ids(num_tokens: int, num_ranks: int, seed: int) -> torch.Tensor:
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(dim=-1)[:, :num_ranks].int().contiguous()


def ffn(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))


@pytest.mark.parametrize(("num_experts", "k"), [(256, 8), (512, 10), (4, 1), (3, 3)])
def test_trap_01_weights_are_renormalised(num_experts: int, k: int) -> None:
    logits = torch.randn(50, num_experts, generator=torch.Generator().manual_seed(1))
    logits[0] = 0.0  # every expert alike: the smallest possible sum before the division
    logits[1] = torch.linspace(-1e4, 1e4, num_experts)  # one expert takes all
    ids, weights = choose_experts(logits, k)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(50))
    chosen = torch.gather(logits, 1, ids.long())
    # Softmax over all, then renormalised, is softmax over the chosen.
    torch.testing.assert_close(weights, chosen.softmax(dim=-1))
    assert (weights.diff(dim=-1) <= 0).all()


@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 4))
def test_ties_go_to_the_lowest_id(seed: int, levels: int) -> None:
    logits = torch.randint(levels, (5, 40), generator=torch.Generator().manual_seed(seed)).float()
    ids, _ = choose_experts(logits, 8)
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(40), key=lambda expert: (-row[expert], expert))[:8]


def test_trap_06_strided_topk() -> None:
    """Ids taken from a sorted row of all experts must come back adjacent, int32 and in range."""
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(2))
    ids, weights = choose_experts(logits, 8)
    assert ids.is_contiguous()
    assert ids.dtype == torch.int32
    read_by_address = np.frombuffer(ids.numpy().tobytes(), dtype=np.int32).reshape(7, 8)
    np.testing.assert_array_equal(read_by_address, logits.topk(8).indices.numpy())
    check_topk_ids(ids, 300)
    assert weights.shape == (7, 8)
    strided = torch.arange(60, dtype=torch.int32).reshape(6, 10)[:, :4]
    with pytest.raises(ValueError, match="contiguous"):
        check_topk_ids(strided, 300)
    with pytest.raises(ValueError, match="int32"):
        check_topk_ids(ids.long(), 300)


@pytest.mark.parametrize("bad_id", [-1, NUM_EXPERTS, 255, 256, 2**31 - 1])
def test_trap_07_expert_ids_out_of_range(bad_id: int) -> None:
    ids = random_ids(4, 2, seed=3)
    ids[2, 1] = bad_id
    with pytest.raises(ValueError, match="expert ids from"):
        routed_experts(torch.ones(4, E), ids, *stacks(3))


def test_trap_07_more_than_256_experts() -> None:
    logits = torch.zeros(1, 512)
    logits[0, [511, 256, 255]] = torch.tensor([3.0, 2.0, 1.0])
    assert choose_experts(logits, 4)[0].tolist() == [[511, 256, 255, 0]]


@settings(max_examples=25)
@given(num_tokens=st.integers(0, 6), num_ranks=st.integers(1, NUM_EXPERTS), seed=st.integers(0, 999))
def test_each_rank_gets_its_own_expert(num_tokens: int, num_ranks: int, seed: int) -> None:
    gate, up, down = stacks(seed)
    x = torch.randn(num_tokens, E, generator=torch.Generator().manual_seed(seed))
    ids = random_ids(num_tokens, num_ranks, seed)
    output = routed_experts(x, ids, gate, up, down)
    assert output.shape == (num_tokens, num_ranks, E)
    for t in range(num_tokens):
        for rank, expert in enumerate(ids[t].tolist()):
            expected = ffn(x[t], gate[expert], up[expert], down[expert])
            torch.testing.assert_close(output[t, rank], expected, atol=1e-4, rtol=1e-4)


DOWN_TYPES = [QuantType.Q6_K, QuantType.Q5_K, QuantType.F16, QuantType.IQ3_S]


@pytest.mark.parametrize("down_type", DOWN_TYPES, ids=lambda t: t.name)
def test_trap_08_the_down_type_may_differ(down_type: QuantType) -> None:
    gate = random_weight(QuantType.Q4_K, (3, 256, 256), seed=1)
    up = random_weight(QuantType.IQ2_XS, (3, 256, 256), seed=2)
    down = random_weight(down_type, (3, 256, 256), seed=3)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(4))
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    output = routed_experts(x, ids, gate, up, down, linear_exact, swiglu_exact)
    for t, rank in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        parts = (dequantize(stack[int(ids[t, rank])]) for stack in (gate, up, down))
        error = (output[t, rank] - ffn(x[t], *parts)).norm() / output[t, rank].norm()
        assert error < 0.1  # activations of 8 bits; another matrix or order gives about 1


@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_trap_08_fused_gate_and_up_are_gate_first(exact: bool) -> None:
    ops = ReferenceOps(exact=exact)
    gate, up, _ = stacks(5)
    fused = torch.cat((gate, up), dim=1)
    if exact:
        fused = QuantTensor(fused.contiguous().view(torch.uint8), QuantType.F32, tuple(fused.shape))
    first, second = ops.split_rows(fused, [F, F])
    as_values = dequantize if exact else torch.clone
    assert torch.equal(as_values(first), gate)
    assert torch.equal(as_values(second), up)


@pytest.mark.parametrize("wrong", ["up", "down", "input"])
def test_trap_09_expert_shapes_must_fit(wrong: str) -> None:
    gate, up, down = stacks(6)
    x = torch.ones(2, E)
    if wrong == "up":
        up = up[:-1]
    elif wrong == "down":
        down = down.mT
    else:
        x = torch.ones(2, E + 1)
    with pytest.raises(ValueError, match="do not fit"):
        routed_experts(x, random_ids(2, 2, seed=6), gate, up, down)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
def test_trap_02_shared_gate_is_applied_once_to_every_token(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(7)
    routed = torch.randn(num_tokens, 3, E, generator=generator)
    weights = torch.rand(num_tokens, 3, generator=generator)
    shared = torch.randn(num_tokens, E, generator=generator)
    gate = torch.randn(num_tokens, 1, generator=generator)
    output = combine_experts(routed, weights, shared, gate)
    for t in range(num_tokens):
        expected = (weights[t, :, None] * routed[t]).sum(0) + torch.sigmoid(gate[t, 0]) * shared[t]
        torch.testing.assert_close(output[t], expected)
    only_shared = combine_experts(torch.zeros_like(routed), weights, shared, gate)
    torch.testing.assert_close(only_shared, torch.sigmoid(gate) * shared)
    only_routed = combine_experts(routed, weights, torch.zeros_like(shared), gate)
    torch.testing.assert_close(only_routed, (weights.unsqueeze(-1) * routed).sum(1))


def test_a_shared_expert_without_a_gate_has_weight_1() -> None:
    generator = torch.Generator().manual_seed(11)
    routed, shared = (torch.randn(shape, generator=generator) for shape in ((4, 3, E), (4, E)))
    weights = torch.rand(4, 3, generator=generator)
    alone = combine_experts(routed, weights, None, None)
    torch.testing.assert_close(combine_experts(routed, weights, shared, None) - alone, shared)
    exact = ReferenceOps(exact=True)
    assert torch.equal(
        exact.combine_experts(routed, weights, shared, None),
        exact.combine_experts(routed, weights, None, None) + shared,
    )


def test_exact_combination_is_one_fma_per_rank() -> None:
    """The order matters here: 1 + 2^-24 + 2^-24 is 1 from the left and more than 1 from the right."""
    half_ulp = 2.0**-24
    routed = torch.tensor([[[1.0], [half_ulp], [half_ulp]]])
    shared, gate = torch.zeros(1, 1), torch.zeros(1, 1)
    ops = ReferenceOps(exact=True)
    assert ops.combine_experts(routed, torch.ones(1, 3), shared, gate).item() == 1.0
    assert ops.combine_experts(routed.flip(1), torch.ones(1, 3), shared, gate).item() > 1.0
    # An exact product that would be rounded away before an ordinary addition.
    a = 1 + 2.0**-12
    fused = ops.combine_experts(
        torch.tensor([[[-1.0], [a]]]), torch.tensor([[1 + 2.0**-11, a]]), shared, gate
    )
    assert Fraction(fused.item()) == Fraction(a) ** 2 - Fraction(1 + 2.0**-11)


def test_trap_48_no_tokens_give_empty_results() -> None:
    ids, weights = choose_experts(torch.empty(0, NUM_EXPERTS), 2)
    assert (ids.shape, weights.shape) == ((0, 2), (0, 2))
    routed = routed_experts(torch.empty(0, E), ids, *stacks(8))
    assert routed.shape == (0, 2, E)
    assert combine_experts(routed, weights, torch.empty(0, E), torch.empty(0, 1)).shape == (0, E)


def test_gradients() -> None:
    dtype = torch.float64
    generator = torch.Generator().manual_seed(9)
    x, router = (torch.randn(n, E, generator=generator, dtype=dtype) for n in (3, NUM_EXPERTS))
    shared, shared_gate = (torch.randn(3, n, generator=generator, dtype=dtype) for n in (E, 1))
    inputs = [t.requires_grad_() for t in (x, router, *stacks(9, dtype), shared, shared_gate)]

    def call(x, router, gate, up, down, shared, shared_gate) -> torch.Tensor:
        ids, weights = choose_experts(x @ router.T, 2)
        return combine_experts(routed_experts(x, ids, gate, up, down), weights, shared, shared_gate)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_exact_activation_is_close() -> None:
    gate, up = torch.randn(2, 100, generator=torch.Generator().manual_seed(10)) * 10
    torch.testing.assert_close(swiglu_exact(gate, up), swiglu(gate, up), atol=1e-6, rtol=1e-6)
    assert torch.equal(swiglu_exact(gate, up), exact_arithmetic.silu(gate) * up)
