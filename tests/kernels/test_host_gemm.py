"""GEMM: the GPU's kernels on the host against the exact reference, bit for bit.

The host's device has no products of four warps, so that its choice of tiles is that of devices without.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from cuda_gemm_cases import device_activations
from gpu_cases import assert_same, on_gpu
from guarded import Guarded
from random_blocks import activations, extreme_weight, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.gemm_tiles import Tiling, least_tilings
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.linear.cuda_gemm import PROGRAM, TILINGS, launch_linear, linear_gemm
from coldstream.kernels.linear.integer_types import BLOCK_TYPES, INTEGER_TYPES
from coldstream.kernels.linear.reference import linear_exact
from host_device import EVERY_LANE_ARRIVES, HOST, HostDevice

pytestmark = pytest.mark.usefixtures("host")

CPU = torch.device("cpu")


@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
def test_every_type(quant_type: QuantType) -> None:
    step = quant_type.block_elements
    for cols in (2 * step, 9 * step) if step == 256 else (step, 13 * step, 65 * step):
        weight = random_weight(quant_type, (70, cols), seed=cols)
        for rows in (9, 37):
            x, out = activations(rows, rows, cols), Guarded(rows, 70, device=CPU)
            linear_gemm(device_activations(x, quant_type, "cpu"), on_gpu(weight, device="cpu"), out.tensor)
            assert_same(out.checked(), linear_exact(x, weight))


def compare(tiling: Tiling, quant_type: QuantType, sizes: Sequence[tuple[int, int]]) -> None:
    """A tiling's products of 150 weight rows with the reference's, by columns and rows of activations."""
    for cols, rows in sizes:
        weight, x = random_weight(quant_type, (150, cols), seed=cols), activations(rows, rows, cols)
        out = Guarded(rows, 150, device=CPU)
        codes = device_activations(x, quant_type, "cpu")
        launch_linear(PROGRAM, tiling, codes, on_gpu(weight, device="cpu"), out.tensor)
        assert_same(out.checked(), linear_exact(x, weight))


# One block, some accumulators with one, or one more than others.
BLOCK_SIZES = [(64, 40), (7 * 64, 17), (33 * 64, 65)]


@pytest.mark.sharded
@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
def test_products_of_four_warps(quant_type: QuantType) -> None:
    (tiling,) = (each for each in TILINGS[quant_type] if each.by_warpgroups)
    sizes = BLOCK_SIZES if quant_type in BLOCK_TYPES else []
    compare(tiling, quant_type, [(512, 70), (2304, 9), *sizes])


@pytest.mark.sharded
@pytest.mark.parametrize("quant_type", sorted(BLOCK_TYPES), ids=lambda t: t.name)
def test_blocks_by_single_warps(quant_type: QuantType) -> None:
    (tiling,) = (each for each in TILINGS[quant_type] if not each.by_warpgroups)
    compare(tiling, quant_type, BLOCK_SIZES)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
def test_the_greatest_and_the_least_codes(quant_type: QuantType) -> None:
    weight, x = extreme_weight(quant_type, 512), activations(1, 9, 512)
    x[5:7] = torch.tensor([[1.0], [-1.0]])
    placed, codes = on_gpu(weight, device="cpu"), device_activations(x, quant_type, "cpu")
    for tiling in dict.fromkeys((TILINGS[quant_type][0], *least_tilings(quant_type))):
        out = Guarded(9, len(weight.blocks), device=CPU)
        launch_linear(PROGRAM, tiling, codes, placed, out.tensor)
        assert_same(out.checked(), linear_exact(x, weight))


def every_lane_arrives(host: HostDevice) -> AbstractContextManager[HostDevice]:
    """A context in which kernels have the form that racecheck can follow."""
    return HostDevice(host.directory, (EVERY_LANE_ARRIVES,)).installed()


def test_one_lane_of_a_warp_arrives_but_for_racecheck(host: HostDevice) -> None:
    def arrivals() -> list[int]:
        """Those there are, and those a barrier waits for."""
        counts = torch.zeros(2, dtype=torch.int32)
        program = CudaProgram(HOST / "arrivals.cu", ("count_arrivals",))
        program.kernel("count_arrivals").launch((1, 1, 1), 32, (counts,), shared_bytes=16)
        return counts.tolist()

    assert arrivals() == [1, 1]
    with every_lane_arrives(host):
        assert arrivals() == [32, 32]


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize(
    ("quant_type", "tiling"),
    [
        (QuantType.Q4_K, least_tilings(QuantType.Q4_K)[0]),
        *(
            (quant_type, each)
            for quant_type in (QuantType.Q4_K, QuantType.Q8_0)
            for each in TILINGS[quant_type]
        ),
    ],
    ids=lambda each: each.name,
)
def test_the_form_for_racecheck_has_the_same_bits(
    host: HostDevice, quant_type: QuantType, tiling: Tiling
) -> None:
    """Stages are used again, and there are tiles for every block and more."""
    with every_lane_arrives(host):
        compare(tiling, quant_type, [(2304, 70)])


def test_scales_of_the_other_kind_are_refused() -> None:
    x = activations(1, 9, 512)
    for quant_type, other in ((QuantType.Q8_0, QuantType.Q4_K), (QuantType.Q4_K, QuantType.Q8_0)):
        weight = on_gpu(random_weight(quant_type, (5, 512), 1), device="cpu")
        with pytest.raises(ValueError, match="scales: an array"):
            linear_gemm(device_activations(x, other, "cpu"), weight, torch.zeros(9, 5))
