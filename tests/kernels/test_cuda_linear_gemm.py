"""GEMM on a GPU: the very bits of the exact reference."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_gemm_cases import arch_of, check_instance, device_activations, device_weight
from guarded import Guarded
from quant_cases import same_numbers
from random_blocks import activations, float16_places, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.cuda.gemm_tiles import LEAST_SHARED_BYTES, Tiling, least_tilings
from coldstream.kernels.linear.cuda_gemm import PROGRAM, TILINGS, instance, launch_linear, linear_gemm
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000)
TYPES = tuple(TILINGS)


def instances_and_archs() -> Iterator[tuple[QuantType, str, str]]:
    """Every instance of each type, for one of two architectures, alternately."""
    for number, quant_type in enumerate(TYPES):
        for place, tiling in enumerate(dict.fromkeys((*TILINGS[quant_type], *least_tilings(quant_type)))):
            yield quant_type, instance(tiling), arch_of(tiling, number + place)


@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    ("quant_type", "kernel", "arch"), [*instances_and_archs()], ids=lambda each: getattr(each, "name", each)
)
def test_compiles(quant_type: QuantType, kernel: str, arch: str, tmp_path: Path) -> None:
    check_instance(PROGRAM, quant_type, kernel, arch, tmp_path)


def cols(quant_type: QuantType, groups: int) -> int:
    """About `groups` groups of 256, and not a multiple of them where the type allows it."""
    return 256 * groups - (
        0 if quant_type.block_elements == 256 else 96 if quant_type.block_elements == 32 else 64
    )


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_every_row_count(quant_type: QuantType, num_tokens: int) -> None:
    x = activations(num_tokens, num_tokens, cols(quant_type, 2))
    weight = random_weight(quant_type, (33, x.shape[1]), 5)
    out = Guarded(num_tokens, 33, gap=3)
    linear_gemm(device_activations(x, weight.quant_type), device_weight(weight), out.tensor)
    assert same_numbers(out.checked(), linear_exact(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("num_rows", SIZES)
def test_every_width(quant_type: QuantType, num_rows: int) -> None:
    x = activations(7, 70, cols(quant_type, 1))
    weight = random_weight(quant_type, (num_rows, x.shape[1]), 6)
    offset = quant_type.alignment * (num_rows % 8)
    out = Guarded(70, num_rows)
    linear_gemm(device_activations(x, weight.quant_type), device_weight(weight, offset), out.tensor)
    assert same_numbers(out.checked(), linear_exact(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31])
def test_every_number_of_groups(quant_type: QuantType, groups: int) -> None:
    x = activations(groups, 37, cols(quant_type, groups))
    weight = random_weight(quant_type, (150, x.shape[1]), groups)
    out = Guarded(37, 150, gap=2)
    linear_gemm(device_activations(x, weight.quant_type), device_weight(weight), out.tensor)
    assert same_numbers(out.checked(), linear_exact(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", TYPES)
def test_tiles_of_one_block_follow_each_other(quant_type: QuantType) -> None:
    """More tiles than blocks, the last ones ragged on both sides."""
    x = activations(3, 1000, 512)
    weight = random_weight(quant_type, (4100, 512), 9)
    out = Guarded(1000, 4100)
    linear_gemm(device_activations(x, weight.quant_type), device_weight(weight), out.tensor)
    chosen = torch.arange(0, 1000, 7)
    expected = torch.cat([linear_exact(x[chosen], part) for part in weight.split_rows((2050, 2050))], dim=1)
    assert same_numbers(out.checked()[chosen], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", TYPES)
def test_extreme_codes(quant_type: QuantType) -> None:
    """The largest integers that the type can make, of both signs, scales that are not finite, zero rows."""
    x = activations(4, 40, 768)
    x[0] = 3.0
    x[1] = -3.0
    x[2, 300] = torch.inf
    x[3] = 0.0
    weight = random_weight(quant_type, (64, 768), 10)
    for row, fill in ((0, 0xFF), (1, 0x00), (2, 0x80), (3, 0x7F)):
        blocks = weight.blocks[row].view(-1, quant_type.block_bytes)
        kept = blocks.clone()
        blocks.fill_(fill)
        for place in float16_places(quant_type):
            blocks[:, place : place + 2] = kept[:, place : place + 2]
    weight.blocks[4] = 0xFF  # NaN scales
    out = Guarded(40, 64)
    linear_gemm(device_activations(x, weight.quant_type), device_weight(weight), out.tensor)
    assert same_numbers(out.checked(), linear_exact(x, weight))


def assert_refused(x: torch.Tensor, weight: QuantTensor, reason: str) -> None:
    (tiling, *_), out = least_tilings(weight.quant_type), torch.zeros(len(x), weight.shape[0])
    with pytest.raises(ValueError, match=reason):
        launch_linear(PROGRAM, tiling, quantize_activations(x), weight, out)


@pytest.mark.parametrize("quant_type", TYPES)
def test_refuses_what_does_not_fit(quant_type: QuantType) -> None:
    weight = random_weight(quant_type, (48, 512), 1)
    assert_refused(activations(1, 20, 256), weight, "do not fit")
    step = quant_type.alignment
    memory = torch.zeros(weight.blocks.numel() + 16, dtype=torch.uint8)
    for offset in range(1, step):
        start = -memory.data_ptr() % 16 + offset
        misplaced = memory[start : start + weight.blocks.numel()].view(weight.blocks.shape)
        assert_refused(activations(1, 20, 512), replace(weight, blocks=misplaced), "aligned address")


@pytest.mark.parametrize("quant_type", TYPES)
def test_least_tilings_fit_every_device(quant_type: QuantType) -> None:
    tilings = least_tilings(quant_type)
    assert tilings[0].shared_bytes <= 99 * 1024
    assert tilings[-1].shared_bytes <= LEAST_SHARED_BYTES == 64 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize(
    "choose",
    [
        lambda quant_type: TILINGS[quant_type][-1],
        lambda quant_type: least_tilings(quant_type)[0],
        lambda quant_type: least_tilings(quant_type)[-1],
    ],
    ids=["no warpgroups", "little shared memory", "the least shared memory"],
)
def test_tilings_of_other_devices(quant_type: QuantType, choose: Callable[[QuantType], Tiling]) -> None:
    x = activations(6, 90, 768)
    weight = random_weight(quant_type, (200, 768), 3)
    out = Guarded(90, 200)
    tiling = choose(quant_type)
    launch_linear(
        PROGRAM, tiling, device_activations(x, weight.quant_type), device_weight(weight), out.tensor
    )
    assert same_numbers(out.checked(), linear_exact(x, weight))
