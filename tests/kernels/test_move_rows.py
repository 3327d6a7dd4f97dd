"""A commit on the GPU moves keys and values as the operations in PyTorch do."""

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.attention.move_rows import MOST_CACHES, move_rows_cuda
from coldstream.kernels.ops import BLOCK_POSITIONS, MAX_TREE_ROWS, CommittedPath
from coldstream.kernels.reference_ops import ReferenceOps
from host_device import HostDevice

NUM_BLOCKS = 5


def a_path(first: int, rows: list[int], seed: int) -> CommittedPath:
    order = list(range(NUM_BLOCKS))
    Random(seed).shuffle(order)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    sources = ints(*rows, *[10**6] * (MAX_TREE_ROWS - len(rows)))
    return CommittedPath(ints(0), ints(len(rows)), ints(first), sources, sources, ints(*order))


def check(first: int, rows: list[int], row_bytes: Sequence[int], device: str) -> None:
    """row_bytes: of a head of each layer."""
    generator = torch.Generator().manual_seed(first)
    shapes = [(2, NUM_BLOCKS, BLOCK_POSITIONS, 2, size) for size in row_bytes]
    caches = [torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for shape in shapes]
    path = a_path(first, rows, seed=first)
    expected, found = [layer.clone() for layer in caches], [layer.to(device) for layer in caches]
    ReferenceOps().commit_attention([(k, v) for k, v in expected], path)
    there = CommittedPath(*(each.to(device) for each in vars(path).values() if each is not None))
    move_rows_cuda([(k, v) for k, v in found], there)
    for layer, of_reference in zip(found, expected, strict=True):
        assert torch.equal(layer.cpu(), of_reference)


paths = st.lists(st.integers(0, MAX_TREE_ROWS - 1), unique=True, max_size=MAX_TREE_ROWS).map(sorted)


@settings(max_examples=25, deadline=None)
@given(
    first=st.sampled_from([0, 1, 200, 254, 255, 256, 500]),
    rows=paths,
    row_bytes=st.sampled_from([(80, 80), (528, 528), (80, 528, 80)]),
)
def check_all(host: HostDevice, first: int, rows: list[int], row_bytes: tuple[int, ...]) -> None:
    check(first, rows, row_bytes, "cpu")


@pytest.mark.sharded(of="kernels")
def test_rows_of_a_path_move_as_the_reference_moves_them(host: HostDevice) -> None:
    check_all(host)


@pytest.mark.usefixtures("host")
def test_more_layers_than_a_launch_has_move_too() -> None:
    check(254, [1, 3], [80] * (MOST_CACHES // 2 + 1), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 254, 500])
@pytest.mark.parametrize("rows", [[], [0], [3], [0, 1, 2], [0, 2, 5, 63], list(range(1, 64, 2))])
def test_a_gpu_moves_them_so_too(first: int, rows: list[int]) -> None:
    check(first, rows, [528, 80, 528], "cuda")


def test_caches_that_are_laid_out_otherwise_are_refused() -> None:
    k = torch.zeros(2, BLOCK_POSITIONS, 1, 32, dtype=torch.int8)
    for refused in (k[..., :24].contiguous(), k[:, ::2]):
        with pytest.raises(ValueError, match="pieces of 16"):
            move_rows_cuda([(k, k), (refused, refused)], a_path(0, [0], 0))
