"""Hyper-connections: the definition against `transformers`, its bits on CPUs and on a GPU."""

import pytest
import torch
from cpu_cases import AWKWARD_SIZES, Output, Results, run_everywhere, same_bits
from cuda_row_cases import (
    CUDA,
    GuardedActivations,
    check_compiles,
    for_each_architecture,
    random,
    spiky,
)
from guarded import Guarded
from same_bits import assert_same_bits

from all_pairs import all_pairs
from coldstream.kernels import _csrc
from coldstream.kernels.arithmetic import reference as exact
from coldstream.kernels.experts.reference import combine_experts
from coldstream.kernels.hyper_connections import reference as plain
from coldstream.kernels.hyper_connections.cuda import (
    PROGRAM,
    inject_norm_cuda,
    mix_streams_cuda,
    scaled_silu_cuda,
)
from coldstream.kernels.hyper_connections.reference import (
    inject_exact,
    mix_streams_exact,
    norm_streams_exact,
    scaled_silu_exact,
)
from coldstream.kernels.ops import ExpertOutputs, Routing
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.rms_norm.cuda import SHARED_KINDS
from coldstream.layers.hyper_connections import HyperConnectionWeights, enter_streams, update_streams

Runtimes = list[_csrc.Runtime]
EPS = 1e-6
CPU = torch.device("cpu")


@torch.no_grad()
def test_the_layer_equals_transformers() -> None:
    """Two parts, each of which doubles what it reads, and the mixture behind them."""
    # Here, as only this test needs it: it is not there where kernels of another machine are tested.
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

    config = Qwen4ExpTextConfig(hidden_size=24, hc_count=3, hc_lowrank=5, rms_norm_eps=EPS)
    parts = [Qwen4ExpTextGatedResidual(config) for _ in range(2)]
    parts.append(Qwen4ExpTextGatedResidual(config, use_combine=False))
    for seed, parameter in enumerate(value for part in parts for value in part.parameters()):
        parameter.copy_(random(seed, *parameter.shape, scale=0.5))
    embedded = random(99, 4, 24)
    hidden = embedded.repeat(1, 3)
    for part in parts[:2]:
        mixed, before, injection = part(hidden)
        hidden = before + ((2 * mixed).unsqueeze(-2) * injection.unsqueeze(-1)).flatten(-2)
    expected = parts[2](hidden)
    ops = ReferenceOps()
    weights = [
        HyperConnectionWeights(
            1 + part.hc_norm.weight,
            part.input_mix_weight_down.weight,
            part.input_mix_weight_up.weight,
            None if part.block_inject_weight is None else part.block_inject_weight.weight,
            3,
        )
        for part in parts
    ]
    streams, mixed = enter_streams(ops, embedded, weights[0], EPS)
    for each in weights[1:]:
        streams, mixed = update_streams(ops, streams, 2 * mixed, each, EPS)
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    assert streams.injection is None


def test_what_is_exact_is_near_what_is_plain() -> None:
    streams, update, injection = random(1, 3, 80), random(2, 3, 20), random(3, 3, 4, scale=3)
    weight, gates = random(4, 80), random(5, 3, 80)
    total = plain.inject(streams, update, injection, 4)
    torch.testing.assert_close(inject_exact(streams, update, injection, 4), total)
    torch.testing.assert_close(inject_exact(None, update, None, 4), plain.inject(None, update, None, 4))
    normed = plain.norm_streams(total, weight, EPS, 20)
    torch.testing.assert_close(norm_streams_exact(total, weight, EPS, 20), normed)
    torch.testing.assert_close(scaled_silu_exact(gates, 4), plain.scaled_silu(gates, 4))
    torch.testing.assert_close(mix_streams_exact(normed, gates, 4), plain.mix_streams(normed, gates, 4))


@all_pairs(size=AWKWARD_SIZES, num_streams=[2, 3, 4, 8], begins=[False, True])
def test_an_update_on_the_cpu(runtimes: Runtimes, size: int, num_streams: int, begins: bool) -> None:
    width = num_streams * size
    update, weight = random(2, 3, size), random(4, width)
    streams = None if begins else random(1, 3, width)
    injection = None if begins else random(3, 3, num_streams, scale=20)

    def call(runtime: _csrc.Runtime) -> Results:
        total, normed = Output(3, width), Output(3, width)
        _csrc.inject_norm(runtime, streams, update, injection, weight, EPS, total.rows, normed.rows)
        return total.checked(), normed.checked()

    total, normed = run_everywhere(call, runtimes)
    expected = inject_exact(streams, update, injection, num_streams)
    assert same_bits(total, expected)
    assert same_bits(normed, norm_streams_exact(expected, weight, EPS, size))


@all_pairs(size=[*AWKWARD_SIZES, 5000], num_streams=[2, 3, 4, 8])
def test_a_mixture_and_its_gate_on_the_cpu(runtimes: Runtimes, size: int, num_streams: int) -> None:
    normed, gates = random(1, 2, num_streams * size), random(2, 2, num_streams * size, scale=20)

    def call(runtime: _csrc.Runtime) -> Results:
        mixed, opened = Output(2, size), Output(2, num_streams * size)
        _csrc.mix_streams(runtime, normed, gates, mixed.rows)
        _csrc.scaled_silu(runtime, gates, num_streams, opened.rows)
        return mixed.checked(), opened.checked()

    mixed, opened = run_everywhere(call, runtimes)
    assert same_bits(mixed, mix_streams_exact(normed, gates, num_streams))
    assert same_bits(opened, scaled_silu_exact(gates, num_streams))


def test_shapes_that_the_cpu_refuses(fastest: _csrc.Runtime) -> None:
    x, wide = torch.zeros(2, 8), torch.zeros(2, 20)
    with pytest.raises(ValueError, match="20 weights are no whole number of streams of 8"):
        _csrc.inject_norm(fastest, None, x, None, wide[0], EPS, wide, wide)
    with pytest.raises(ValueError, match="streams come with the weights"):
        _csrc.inject_norm(fastest, x, x, None, x[0], EPS, x, x)
    with pytest.raises(ValueError, match="20 values are no whole number of streams of 8"):
        _csrc.mix_streams(fastest, wide, wide, x)


@pytest.mark.sharded
@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)


def check_update(
    rows: int, size: int, num_streams: int, *, begins: bool, in_place: bool, device: torch.device
):
    width = num_streams * size
    update, weight = spiky(2, rows, size), random(4, width)
    streams = None if begins else spiky(1, rows, width)
    injection = None if begins else random(3, rows, num_streams, scale=9)
    expected = inject_exact(streams, update, injection, num_streams)
    total, out = Guarded(rows, width, device=device), Guarded(rows, width, device=device)
    codes = GuardedActivations(rows, width, device)
    source = None if streams is None else streams.to(device)
    if in_place and source is not None:
        total.tensor.copy_(source)
        source = total.tensor
    logits = None if injection is None else injection.to(device)
    inject_norm_cuda(
        source, update.to(device), logits, total.tensor, weight.to(device), EPS, out.tensor, codes.out
    )
    assert_same_bits(total.checked(), expected)
    normed = norm_streams_exact(expected, weight, EPS, size)
    assert_same_bits(out.checked(), normed)
    codes.check(normed)


SHAPES = {"rows": [1, 3, 65], "size": [8, 24, 72, 256], "num_streams": [2, 4, 8]}


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@all_pairs(**SHAPES, begins=[False, True], in_place=[False, True])
def test_an_update_by_the_kernel(
    rows: int, size: int, num_streams: int, begins: bool, in_place: bool
) -> None:
    check_update(rows, size, num_streams, begins=begins, in_place=in_place, device=CPU)


@pytest.mark.gpu
@all_pairs(
    rows=[1, 2, 64, 65, 500], size=[8, 24, 72, 256, 1536, 2560], num_streams=[2, 4], begins=[False, True]
)
def test_an_update_on_a_gpu(rows: int, size: int, num_streams: int, begins: bool) -> None:
    check_update(rows, size, num_streams, begins=begins, in_place=False, device=CUDA)


def check_experts(rows: int, size: int, ranks: int, *, kind: str, device: torch.device) -> None:
    streams, injection, weight = spiky(1, rows, 4 * size), random(2, rows, 4), random(3, 4 * size)
    routed, topk_weights = spiky(4, rows, ranks, size), random(5, rows, ranks).softmax(-1)
    shared = None if kind == "no_shared" else spiky(6, rows, size)
    gate = random(7, rows, 1) if kind == "gated_shared" else None
    update = combine_experts(routed, topk_weights, shared, gate, exact.fma, exact.sigmoid)
    expected = inject_exact(streams, update, injection, 4)
    total, out = Guarded(rows, 4 * size, device=device), Guarded(rows, 4 * size, device=device)
    codes = GuardedActivations(rows, 4 * size, device)

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    ids = torch.zeros(rows, ranks, dtype=torch.int32)  # whose outputs these are doesn't matter to their sum
    experts = ExpertOutputs(there(routed), there(shared), Routing(*map(there, (ids, topk_weights, gate))))
    inject_norm_cuda(
        there(streams), experts, there(injection), total.tensor, there(weight), EPS, out.tensor, codes.out
    )
    assert_same_bits(total.checked(), expected)
    normed = norm_streams_exact(expected, weight, EPS, size)
    assert_same_bits(out.checked(), normed)
    codes.check(normed)


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@all_pairs(rows=[1, 3], size=[24, 256], ranks=[1, 8, 10], kind=SHARED_KINDS)
def test_an_update_by_experts(rows: int, size: int, ranks: int, kind: str) -> None:
    check_experts(rows, size, ranks, kind=kind, device=CPU)


@pytest.mark.gpu
@all_pairs(rows=[1, 3, 100], size=[24, 256, 2560], ranks=[1, 8, 10], kind=SHARED_KINDS)
def test_an_update_by_experts_on_a_gpu(rows: int, size: int, ranks: int, kind: str) -> None:
    check_experts(rows, size, ranks, kind=kind, device=CUDA)


def check_mixture(rows: int, size: int, num_streams: int, device: torch.device) -> None:
    normed, gates = spiky(1, rows, num_streams * size), random(2, rows, num_streams * size, scale=9)
    out, codes = Guarded(rows, size, device=device), GuardedActivations(rows, size, device)
    mix_streams_cuda(normed.to(device), gates.to(device), out.tensor, codes.out)
    expected = mix_streams_exact(normed, gates, num_streams)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)


def check_gate(rows: int, cols: int, device: torch.device) -> None:
    x = random(3, rows, cols, scale=20)
    out, codes = Guarded(rows, cols, device=device), GuardedActivations(rows, cols, device)
    scaled_silu_cuda(x.to(device), 4, out.tensor, codes.out)
    expected = scaled_silu_exact(x, 4)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@all_pairs(**SHAPES)
def test_a_mixture_by_the_kernel(rows: int, size: int, num_streams: int) -> None:
    check_mixture(rows, size, num_streams, CPU)
    check_gate(rows, size + num_streams % 3, CPU)


@pytest.mark.gpu
@all_pairs(rows=[1, 2, 64, 65, 500], size=[8, 24, 320, 2560], num_streams=[2, 4])
def test_a_mixture_on_a_gpu(rows: int, size: int, num_streams: int) -> None:
    check_mixture(rows, size, num_streams, CUDA)
    check_gate(rows, size + num_streams % 3, CUDA)


def test_shapes_without_a_kernel_are_refused() -> None:
    x, wide = torch.zeros(2, 20), torch.zeros(2, 80)
    with pytest.raises(ValueError, match="whole streams, of a multiple of 8 each"):
        inject_norm_cuda(None, x, None, wide, wide[0], EPS, wide, GuardedActivations(2, 80, CPU).out)
    x, wide = torch.zeros(2, 4096), torch.zeros(2, 16384)
    with pytest.raises(ValueError, match="no kernel for 4 streams of 4096 values"):
        mix_streams_cuda(wide, wide, x, GuardedActivations(2, 4096, CPU).out)
    x, wide = torch.zeros(2, 8), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="come together"):
        inject_norm_cuda(wide, x, None, wide, wide[0], EPS, wide, GuardedActivations(2, 16, CPU).out)
