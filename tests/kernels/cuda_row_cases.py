"""Shared by tests of the GPU's row-wise kernels."""

from collections.abc import Callable

import pytest
import torch
from guarded import Guarded
from same_bits import assert_same_bits

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, SUM_SIZE, QuantActivations, padded_cols
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.cuda.program import CudaProgram

ROW_COUNTS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000)
CUDA = torch.device("cuda")


def random(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spiky(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers with outliers, rounding ties, zeros and tiny values."""
    x = random(seed, *shape)
    chance = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1))
    x = torch.where(chance < 0.02, x * 50, x)
    x = torch.where(chance > 0.8, torch.round(x * 2) / 2, x)
    return torch.where(chance > 0.98, x * 1e-37, x)


def rows_apart(x: torch.Tensor, gap: int, device: torch.device = CUDA) -> torch.Tensor:
    """x on the device as a view whose rows have `gap` NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), torch.nan, device=device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


class GuardedActivations:
    """Quantised rows to be written, each part inside a larger buffer."""

    def __init__(self, rows: int, cols: int, device: torch.device = CUDA) -> None:
        padded = padded_cols(cols)
        self.q = Guarded(rows, padded, dtype=torch.int8, device=device)
        self.scales = Guarded(rows, padded // GROUP_SIZE, device=device)
        self.sums = Guarded(rows, padded // SUM_SIZE, dtype=torch.int16, device=device)
        self.out = QuantActivations(self.q.tensor, self.scales.tensor, self.sums.tensor)

    def check(self, x: torch.Tensor) -> None:
        """They must be the quantised rows of x, padded with zeros."""
        expected = quantize_activations(torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP_SIZE)))
        assert_same_bits(self.q.checked(), expected.q)
        assert_same_bits(self.scales.checked(), expected.scales)
        assert_same_bits(self.sums.checked(), expected.sums)


def for_each_architecture(test: Callable[..., None]) -> Callable[..., None]:
    """The test with `arch`: the oldest and the main architecture, and one with another optimiser.

    CI runs it for one of them, another one from commit to commit.
    """
    return pytest.mark.sharded(pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])(test))


def check_compiles(program: CudaProgram, arch: str, part: slice = slice(None)) -> None:
    """Every kernel must compile for this architecture, or a part of them."""
    for instance in program.instances[part]:
        assert compile_instance(program.source, instance, arch).cubin.startswith(b"\x7fELF")
