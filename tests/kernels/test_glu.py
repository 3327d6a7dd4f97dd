"""Gated units and experts with biases: the definition, the CPU's tiers, and the GPU's kernels on the host."""

from random import Random

import pytest
import torch
from cpu_cases import AWKWARD_SIZES, Output, Results, random, run_everywhere, same_bits
from expert_client import ExpertClient
from glu_cases import (
    ACTIVATIONS,
    CLAMPED,
    EXACT,
    GEGLU,
    UNITS,
    Sizes,
    Types,
    check_on_gpu,
    float_outputs,
    of_floats,
    on_cpu,
    on_host,
    random_experts,
    random_ids,
    stacks_of,
)
from gpu_cases import assert_same, on_gpu
from quant_cases import load
from random_blocks import activations

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import expert_glu
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.ops import Activation, ExpertWeights, FfnWeights, Routing
from coldstream.kernels.swiglu.cuda import swiglu_cuda
from coldstream.kernels.swiglu.reference import glu, glu_exact
from host_device import HostMemory

Runtimes = list[_csrc.Runtime]
Q4K, Q6K, Q8, Q50, MXFP4 = QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q5_0, QuantType.MXFP4
EVERY_UNIT = pytest.mark.parametrize(("activation", "has_biases"), UNITS, ids=str)


def extremes(count: int) -> torch.Tensor:
    """Beyond limits and the clamps of exp, near them, and what is no number."""
    values = torch.tensor(
        [0.0, -0.0, 7.0, -7.0, 7.0000005, -7.1, 200.0, -200.0, 1e20, -1e20, 1e-30, torch.inf]
    )
    return values.repeat(-(-count // len(values)))[:count]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_definitions_are_the_formulas(activation: Activation) -> None:
    gate, up = random(1, 4, 1000, scale=5), random(2, 4, 1000, scale=5)
    expected = of_floats(gate, up, activation)
    for defined in (glu(gate, up, activation), glu_exact(gate, up, activation)):
        torch.testing.assert_close(defined.double(), expected, rtol=2e-6, atol=2e-6)


def test_a_gelu_is_no_silu_and_a_limit_matters() -> None:
    gate, up = random(3, 1, 100, scale=8), random(4, 1, 100, scale=8)
    units = [*ACTIVATIONS, Activation("clamped swiglu", 3.0)]
    results = [glu_exact(gate, up, unit) for unit in units]
    assert all((a - b).abs().max() > 0.1 for i, a in enumerate(results) for b in results[:i])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("size", [*AWKWARD_SIZES, 3000])
def test_every_tier_has_the_bits_of_the_definition(
    runtimes: Runtimes, activation: Activation, size: int
) -> None:
    gate, up = random(5, 3, size, scale=10), random(6, 3, size, scale=10)
    gate[1], up[2] = extremes(size), extremes(size)
    up[2].nan_to_num_(posinf=0.0)
    if activation.kind != "clamped swiglu":
        gate[1].nan_to_num_(posinf=0.0)

    def call(runtime: _csrc.Runtime) -> Results:
        out = Output(3, size)
        _csrc.glu(runtime, gate, up, out.rows, activation.number, activation.limit)
        return (out.checked(),)

    assert same_bits(run_everywhere(call, runtimes)[0], glu_exact(gate, up, activation))


@pytest.mark.parametrize("activation", [CLAMPED, GEGLU], ids=str)
def test_nan_is_kept(runtimes: Runtimes, activation: Activation) -> None:
    gate, up = torch.ones(1, 40), torch.ones(1, 40)
    gate[0, 17] = up[0, 33] = torch.nan
    for runtime in runtimes:
        out = torch.zeros(1, 40)
        _csrc.glu(runtime, gate, up, out, activation.number, activation.limit)
        assert out.isnan().nonzero()[:, 1].tolist() == [17, 33]


@EVERY_UNIT
@pytest.mark.parametrize(
    ("types", "sizes"),
    [
        ((Q4K, Q4K, Q6K), (5, 256, 512)),
        ((Q8, Q50, MXFP4), (4, 288, 96)),
        ((QuantType.F32, QuantType.F32, QuantType.F16), (3, 40, 56)),
    ],
    ids=str,
)
def test_experts_are_near_what_floats_say(
    types: Types, sizes: Sizes, activation: Activation, *, has_biases: bool
) -> None:
    weights = random_experts(types, sizes, activation, has_biases=has_biases)
    x, ids = activations(1, 6, sizes[1]), random_ids(6, 2, sizes[0], seed=1)
    x *= 3 / (dequantize(weights.gate[0]) @ x.T).std()  # so that clamps and the curve of the unit both matter
    routing = Routing(ids, torch.full((6, 2), 0.5), None)
    outputs = EXACT.experts(x, routing, weights)
    total, _ = EXACT.add_norm(torch.zeros_like(x), outputs, torch.ones(sizes[1]), 1e-6)
    expected = float_outputs(x, ids, weights).mean(dim=1)
    error = (total.double() - expected).norm() / expected.norm()
    assert error < 0.03, "activations of 8 bits"


@EVERY_UNIT
def test_experts_of_every_tier_and_number_of_rows(
    runtimes: Runtimes, activation: Activation, *, has_biases: bool
) -> None:
    rng = Random(int(has_biases) + activation.number)
    for types in ((Q4K, Q4K, Q6K), (MXFP4, MXFP4, MXFP4), (Q8, Q50, Q8)):
        cols, size = (256, 256) if Q4K in types else (32 * rng.randint(1, 12), 32 * rng.randint(1, 12))
        weights = random_experts(types, (5, cols, size), activation, has_biases=has_biases)
        for rows in (1, rng.randint(2, 7), 40):
            x, ids = activations(rows, rows, cols), random_ids(rows, 3, 5, seed=rows)
            expected = EXACT.experts(x, Routing(ids, None, None), weights).routed
            for runtime in runtimes:
                assert same_bits(on_cpu(runtime, x, ids, weights), expected), (types, rows, runtime.tier)


@EVERY_UNIT
def test_a_server_of_experts_has_the_same(activation: Activation, *, has_biases: bool) -> None:
    weights = random_experts((Q8, Q8, Q50), (5, 96, 64), activation, has_biases=has_biases)
    client = ExpertClient(96, 3, 2, "auto")
    client.server.add_layer(*map(load, stacks_of(weights)), None, expert_glu(activation, weights.biases))
    client.server.begin()
    for rows in (1, 4, 16):
        x, ids = activations(rows, rows, 96), random_ids(rows, 3, 5, seed=rows)
        expected = EXACT.experts(x, Routing(ids, None, None), weights).routed
        assert same_bits(client.ask(0, x, ids), expected)
    client.server.end()
    client.server.check()


def test_biases_that_do_not_fit_are_refused() -> None:
    weights = random_experts((Q8, Q8, Q8), (5, 96, 64), CLAMPED, has_biases=True)
    biases, x, ids = weights.biases, activations(1, 1, 96), random_ids(1, 2, 5, seed=1)
    assert biases is not None
    gate, up = biases.on_host
    runtime, out = _csrc.Runtime(1, "auto"), torch.zeros(1, 2, 96)
    for unit, message in (
        (lambda: _csrc.ExpertGlu(3), "unknown gated unit 3"),
        (lambda: _csrc.ExpertGlu(1, 7.0, gate, None), "together"),
        (lambda: _csrc.ExpertGlu(1, 7.0, gate, up[:, 1:].copy()), "different shapes"),
        (lambda: _csrc.ExpertGlu(1, 7.0, gate[1:].copy(), up[1:].copy()), "biases must be"),
    ):
        with pytest.raises(ValueError, match=message):
            _csrc.routed_experts(runtime, x, ids, *map(load, stacks_of(weights)), out, unit())


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@EVERY_UNIT
@pytest.mark.parametrize(("rows", "types"), [(1, (Q4K, Q4K, Q6K)), (5, (Q8, Q50, Q8)), (12, (MXFP4,) * 3)])
def test_decode_on_a_gpu(rows: int, types: Types, activation: Activation, *, has_biases: bool) -> None:
    check_on_gpu(rows, on_gpu_experts(types, activation, has_biases=has_biases))


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@EVERY_UNIT
@pytest.mark.parametrize("types", [(Q4K, Q4K, Q6K), (MXFP4, MXFP4, MXFP4), (Q8, Q50, Q8)], ids=str)
def test_prefill_on_a_gpu(types: Types, activation: Activation, *, has_biases: bool) -> None:
    check_on_gpu(40, on_gpu_experts(types, activation, has_biases=has_biases))


def on_gpu_experts(types: Types, activation: Activation, *, has_biases: bool) -> ExpertWeights:
    sizes = (4, 256, 512) if Q4K in types else (4, 288, 96)
    return random_experts(types, sizes, activation, has_biases=has_biases)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("activation", [CLAMPED, GEGLU], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 96), (9, 512), (3, 63)])
def test_the_unit_alone_on_a_gpu(activation: Activation, rows: int, cols: int) -> None:
    gate, up = random(7, rows, cols, scale=10), random(8, rows, cols, scale=10)
    gate[0] = extremes(cols).nan_to_num(posinf=0.0)
    out = torch.empty(rows, cols)
    swiglu_cuda(gate, up, out, None, activation)
    assert_same(out, glu_exact(gate, up, activation))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_dense_network(activation: Activation) -> None:
    experts = random_experts((Q8, Q50, Q8), (1, 96, 64), activation, has_biases=False)
    gate, up, down = (stack[0] for stack in stacks_of(experts))
    ops, x = CudaOps(HostMemory(), 16, 512), activations(2, 3, 96)
    weights = FfnWeights(*(on_gpu(each, device="cpu") for each in (gate, up, down)), activation)
    assert_same(ops.ffn(on_host(ops, x), weights), EXACT.ffn(x, FfnWeights(gate, up, down, activation)))
