"""Matrices are copied and converted as PyTorch does it, and nothing beside them is touched."""

import pytest
import torch
from cuda_row_cases import CUDA, check_compiles, for_each_architecture
from guarded import Guarded

from coldstream.kernels.cuda.array import ArrayError, RawArray
from coldstream.kernels.cuda.copy_values import PROGRAM, copy_values_cuda

TYPES = [
    (torch.float32, torch.float32),
    (torch.int32, torch.int32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
SHAPES = [(1, 1), (3, 63), (2, 256), (5, 300)]


@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)


def values(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all magnitudes; among them infinities, NaN, and halves between two numbers of bfloat16."""
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, cols), generator=torch.Generator().manual_seed(cols))
    bits[:, ::3] = bits[:, ::3] & ~0xFFFF | 0x8000
    numbers = bits.int().view(torch.float32)
    numbers[0, 0] = torch.inf
    return bits.int() if dtype == torch.int32 else numbers.to(dtype)


def check(rows: int, cols: int, types: tuple[torch.dtype, torch.dtype], device: str) -> None:
    wide = values(rows, cols + 7, types[0]).to(device)
    source, guarded = wide[:, 3 : 3 + cols], Guarded(rows, cols, dtype=types[1], device=device)
    copy_values_cuda(source, guarded.tensor)
    torch.testing.assert_close(guarded.checked(), source.to(types[1]).cpu(), rtol=0, atol=0, equal_nan=True)
    target = torch.zeros(rows, cols + 9, dtype=types[1], device=device)
    copy_values_cuda(source, target[:, 4 : 4 + cols])
    torch.testing.assert_close(target[:, 4 : 4 + cols], source.to(types[1]), rtol=0, atol=0, equal_nan=True)
    assert not target[:, :4].any()
    assert not target[:, 4 + cols :].any()


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_values_are_copied(rows: int, cols: int, types: tuple[torch.dtype, torch.dtype]) -> None:
    check(rows, cols, types, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_a_gpu_copies_them_so_too(rows: int, cols: int, types: tuple[torch.dtype, torch.dtype]) -> None:
    check(rows, cols, types, CUDA)


@pytest.mark.usefixtures("host")
def test_one_value_fills_a_column() -> None:
    one, column = torch.tensor([7], dtype=torch.int32), torch.zeros(5, 1, dtype=torch.int32)
    copy_values_cuda(RawArray(one.data_ptr(), (5, 1), "int32", one, (0, 1)), column)
    assert column.flatten().tolist() == [7] * 5


@pytest.mark.usefixtures("host")
def test_rows_from_a_number_on_the_device() -> None:
    source, target = torch.arange(28, dtype=torch.int32).view(7, 4), torch.zeros(2, 3, dtype=torch.int32)
    copy_values_cuda(source[:, 1:], target, torch.tensor([4], dtype=torch.int32))
    assert torch.equal(target, source[4:6, 1:])


def test_matrices_that_are_not_alike_are_refused() -> None:
    source = torch.zeros(2, 8)
    sizes = torch.zeros(2, 7), torch.zeros(1, 8), torch.zeros(3, 8)
    for other in (*sizes, torch.zeros(8, 2).T, torch.zeros(2, 8, dtype=torch.float64)):
        with pytest.raises(ArrayError, match="do not become"):
            copy_values_cuda(source, other)
