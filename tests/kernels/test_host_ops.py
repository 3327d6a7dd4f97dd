"""Operations that pass activations from launch to launch, on the host: products get the form they read."""

from typing import Any

import pytest
import torch
from gpu_cases import assert_same, on_gpu
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda_ops import MAX_NORMED_ROWS, CudaOps
from coldstream.kernels.experts.executor import ResidentExecutor
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear import cuda as linear
from coldstream.kernels.linear.cuda import fits_skinny
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.records import BiasedOutput
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.linear.skinny_layouts import MAX_LARGE_FLOAT_ROWS, MIN_TILED_FLOAT_ROWS
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, RouterWeights, Routing
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.swiglu.reference import swiglu_exact
from device_arrays import fill
from host_device import HostMemory

pytestmark = pytest.mark.usefixtures("host")

Q4K, Q6K, Q8, Q5 = QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q5_0
NUM_EXPERTS, HIDDEN, FFN = 3, 512, 256


def host_ops() -> CudaOps:
    return CudaOps(HostMemory(), 16, 512)


def on_host(ops: CudaOps, x: torch.Tensor) -> Activations:
    rows = ops.activations(*x.shape)
    fill(rows.values, x)
    quantize_cuda(rows.values, rows.quantised)
    return rows


@pytest.mark.parametrize("size", [HIDDEN, HIDDEN + 96])
@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_two_norms_side_by_side(tokens: int, size: int) -> None:
    """What products read of them, in both forms; a group of codes may have values of both."""
    ops, exact = host_ops(), ReferenceOps(exact=True)
    x, y = activations(1, tokens, size), activations(2, tokens, size)
    weights = [torch.rand(size) for _ in range(2)]
    pair = ops.rms_norm_pair(x, weights[0], y, weights[1], 1e-6)
    expected = exact.rms_norm_pair(x, weights[0], y, weights[1], 1e-6)
    assert_same(pair.values, expected)
    for code in vars(on_host(ops, expected).quantised):
        assert_same(getattr(pair.quantised, code), getattr(on_host(ops, expected).quantised, code))


class OwnExecutor(ResidentExecutor):
    """One that reads its input before its router runs."""

    def route(self, x: Activations, *args: Any) -> Routing:
        assert x.before is None, "the norm is there"
        return super().route(x, *args)


@pytest.mark.parametrize("tokens", [1, MAX_NORMED_ROWS, MAX_NORMED_ROWS + 1])
@pytest.mark.parametrize(("is_own", "has_bias"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_norm_for_a_router_is_a_norm(tokens: int, is_own: bool, has_bias: bool) -> None:
    """Whoever computes it: all that is read afterwards has the bits of a norm by itself."""
    router, gate = (random_weight(QuantType.F32, (rows, HIDDEN), rows) for rows in (20, 1))
    x, update, weight = activations(1, tokens, HIDDEN), activations(2, tokens, HIDDEN), torch.rand(HIDDEN)
    if has_bias:
        update = BiasedOutput(update, activations(3, 1, HIDDEN)[0])
    found = []
    for for_router in (False, True):
        ops = host_ops()
        if is_own:
            ops.executor = OwnExecutor(MoeKernels(ops))
        total, normed = ops.add_norm(x, update, weight, 1e-6, for_router=for_router)
        assert (normed.before is not None) == (for_router and tokens <= MAX_NORMED_ROWS)
        routing = ops.router(
            normed,
            RouterWeights(on_gpu(router, device="cpu"), on_gpu(gate, device="cpu"), 4),
            ExpertWeights(None, None, None),
        )
        codes = vars(normed.quantised).values()
        found.append((total, normed.values, *codes, routing.ids, routing.weights, routing.shared_gate))
    expected = ReferenceOps(exact=True).add_norm(x, update, weight, 1e-6)
    assert_same(found[0][0], expected[0])
    assert_same(found[0][1], expected[1])
    for apart, together in zip(*found, strict=True):
        assert_same(together, apart)


@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
@pytest.mark.parametrize(("tokens", "ranks", "size"), [(1, 8, HIDDEN), (5, 3, 100), (2, 10, 63)])
def test_the_sum_of_experts_with_any_shared_expert(tokens: int, ranks: int, size: int, shared: str) -> None:
    x, weight = activations(1, tokens, size), activations(2, 1, size)[0]
    routed = activations(3, tokens * ranks, size).reshape(tokens, ranks, size)
    weights = activations(4, tokens, ranks).softmax(-1)
    output = None if shared == "none" else activations(5, tokens, size)
    gate = activations(6, tokens, 1) if shared == "gated" else None
    experts = ExpertOutputs(routed, output, Routing(None, weights, gate))
    total, normed = host_ops().add_norm(x, experts, weight, 1e-6)
    for found, expected in zip(
        (total, normed.values), ReferenceOps(exact=True).add_norm(x, experts, weight, 1e-6), strict=True
    ):
        assert_same(found, expected)
    by_float = x + (weights.unsqueeze(-1) * routed).sum(1)
    if output is not None:
        by_float += output if gate is None else torch.sigmoid(gate) * output
    torch.testing.assert_close(torch.as_tensor(total.numpy()), by_float, rtol=1e-5, atol=1e-4)


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize("tokens", [2, 11])
def test_matrices_of_either_kind_of_scales_share_their_input(tokens: int) -> None:
    ops, x = host_ops(), activations(1, tokens, HIDDEN)
    weights = [random_weight(kind, (20, HIDDEN), i) for i, kind in enumerate((Q4K, Q8, Q6K, Q5))]
    outs = ops.linear(on_host(ops, x), [on_gpu(weight, device="cpu") for weight in weights])
    for out, weight in zip(outs, weights, strict=True):
        assert_same(out, linear_exact(x, weight))


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize("tokens", [65, 128])
def test_more_rows_than_a_block_takes_meet_every_matrix(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Tall ones have launches of their own, and the others one together."""
    monkeypatch.setattr(linear, "MIN_LARGE_SIDE", 40)
    ops, x = host_ops(), activations(1, tokens, HIDDEN)
    kinds = ((Q4K, 20), (Q4K, 40), (QuantType.F32, 20), (Q6K, 41), (Q6K, 3))
    weights = [random_weight(kind, (rows, HIDDEN), i) for i, (kind, rows) in enumerate(kinds)]
    outs = ops.linear(on_host(ops, x), [on_gpu(weight, device="cpu") for weight in weights])
    for out, weight in zip(outs, weights, strict=True):
        assert_same(out, linear_exact(x, weight))


@pytest.mark.parametrize("quant_type", [QuantType.F32, QuantType.F16, QuantType.BF16], ids=lambda t: t.name)
def test_bits_of_floats_do_not_change_where_gemm_takes_over(quant_type: QuantType) -> None:
    """The same rows meet `linear_skinny`, and with one more GEMM."""
    weight = on_gpu(random_weight(quant_type, (MIN_TILED_FLOAT_ROWS, 96), 5), device="cpu")
    x, ops = activations(6, MAX_LARGE_FLOAT_ROWS + 1, 96), host_ops()
    assert fits_skinny([weight], x[:-1])
    assert not fits_skinny([weight], x)
    fewer, more = (ops.linear(on_host(ops, rows), [weight])[0] for rows in (x[:-1], x))
    assert_same(more[:-1], fewer)


@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    "types",
    [
        (Q4K, Q4K, Q6K),
        (Q4K, Q4K, Q8),
        (Q8, Q4K, Q5),
        (Q5, Q8, Q4K),
        *((kind,) * 3 for kind in sorted(INTEGER_TYPES)),
    ],
    ids=str,
)
def test_experts_of_many_tokens(types: tuple[QuantType, QuantType, QuantType]) -> None:
    ops, tokens = host_ops(), 20
    shapes = ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    stacks = [
        random_weight(kind, (NUM_EXPERTS, *shape), i)
        for i, (kind, shape) in enumerate(zip(types, shapes, strict=True))
    ]
    parts = [[on_gpu(stack[e], device="cpu") for e in range(NUM_EXPERTS)] for stack in stacks]
    tables = [
        ExpertTable(torch.tensor([part.blocks.data_ptr() for part in each]), kind, *shape)
        for each, kind, shape in zip(parts, types, shapes, strict=True)
    ]
    x = activations(2, tokens, HIDDEN)
    ids = torch.tensor([[i % 3, (i + 1) % 3] for i in range(tokens)], dtype=torch.int32)
    routed, shared = MoeKernels(ops).outputs(on_host(ops, x), ids, ExpertWeights(*tables))
    assert shared is None
    assert_same(routed, routed_experts(x, ids, *stacks, linear_exact, swiglu_exact))
