"""The rope angles on the GPU, against the reference."""

import pytest
import torch
from cuda_row_cases import CUDA, check_compiles, for_each_architecture
from guarded import Guarded
from same_bits import assert_same_bits

from coldstream.kernels.ops import RopeSpec
from coldstream.kernels.rope import cuda as rope_cuda
from coldstream.kernels.rope.reference import rope_angles


@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(rope_cuda.PROGRAM, arch)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
@pytest.mark.parametrize("num_dims", [2, 64, 100])
def test_angles_are_those_of_the_positions(rows: int, num_dims: int) -> None:
    table = rope_angles(torch.arange(500), RopeSpec(num_dims, 1e7))
    positions = torch.randint(
        0, 500, (rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(rows)
    )
    out = Guarded(rows, num_dims // 2, 2, device=CUDA)
    rope_cuda.gather_angles_cuda(table.to(CUDA), positions.to(CUDA), out.tensor)
    assert_same_bits(out.checked(), table[positions])
