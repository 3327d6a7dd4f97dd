"""Rows of activations are copied whole, and nothing beside them is touched."""

from dataclasses import replace

import pytest
import torch
from cuda_row_cases import CUDA, check_compiles, for_each_architecture
from guarded import Guarded

from coldstream.kernels.arithmetic.quantised import QuantActivations, padded_cols
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.copy_rows import PROGRAM, copy_rows_cuda

COLS = (32, 256, 300, 2048)
PLACES = ((1, 1, None), (5, 5, None), (5, 2, None), (5, 1, 3), (64, 3, 61))


@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)


def rows_of(count: int, cols: int, device: str) -> Activations:
    values = torch.randn(count, cols, generator=torch.Generator().manual_seed(cols))
    codes = quantize_activations(torch.nn.functional.pad(values, (0, padded_cols(cols) - cols)))
    return Activations(
        values.to(device), QuantActivations(*(part.to(device) for part in vars(codes).values()))
    )


def parts(rows: Activations) -> list[torch.Tensor]:
    return [rows.values, *vars(rows.quantised).values()]


def check(cols: int, num_rows: int, count: int, first: int | None, device: str) -> None:
    source = rows_of(num_rows, cols, device)
    guarded = [Guarded(count, *part.shape[1:], dtype=part.dtype, device=device) for part in parts(source)]
    values, *codes = (each.tensor for each in guarded)
    place = None if first is None else torch.tensor([first], dtype=torch.int32, device=device)
    copy_rows_cuda(source, Activations(values, QuantActivations(*codes)), place)
    begin = first or 0
    for each, part in zip(guarded, parts(source), strict=True):
        assert torch.equal(each.checked(), part[begin : begin + count].cpu())


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize(("num_rows", "count", "first"), PLACES)
def test_rows_are_copied_whole(cols: int, num_rows: int, count: int, first: int | None) -> None:
    check(cols, num_rows, count, first, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize(("num_rows", "count", "first"), PLACES)
def test_a_gpu_copies_them_so_too(cols: int, num_rows: int, count: int, first: int | None) -> None:
    check(cols, num_rows, count, first, CUDA)


def test_rows_that_are_not_alike_are_refused() -> None:
    source = rows_of(3, 256, "cpu")
    for target in (
        rows_of(4, 256, "cpu"),
        rows_of(3, 512, "cpu"),
        replace(source, values=source.values.double()),
        replace(source, values=torch.zeros(256, 3).T),
    ):
        with pytest.raises(ValueError, match="rows"):
            copy_rows_cuda(source, target)
