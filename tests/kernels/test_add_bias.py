"""The bias of a projection, added to its rows on CPUs and on GPUs."""

import numpy as np
import pytest
import torch

from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda.array import ArrayError
from coldstream.kernels.linear.add_bias import add_bias_cuda
from coldstream.kernels.reference_ops import ReferenceOps

SHAPES = [(1, 1), (3, 63), (2, 256), (5, 300)]


def random_rows(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator), torch.randn(shape[1:], generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu(shape: tuple[int, int]) -> None:
    x, bias = random_rows(shape)
    found = CpuOps(1).add_bias(x.numpy().copy(), bias.numpy())
    assert np.array_equal(found, ReferenceOps().add_bias(x, bias).numpy())


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_of_the_host(shape: tuple[int, int]) -> None:
    """Rows may be apart, and what lies between them stays."""
    x, bias = random_rows(shape)
    wide = torch.cat((x, torch.full((shape[0], 4), torch.nan)), dim=1)
    add_bias_cuda(wide[:, : shape[1]], bias)
    assert torch.equal(wide[:, : shape[1]], ReferenceOps().add_bias(x, bias))
    assert wide[:, shape[1] :].isnan().all()


def test_a_bias_of_another_width_is_refused() -> None:
    x, _ = random_rows((3, 63))
    with pytest.raises(ArrayError, match=r"\(64,\) is no bias of rows \(3, 63\)"):
        add_bias_cuda(x, torch.zeros(64))
