"""Scales of embeddings and soft caps of logits: their definition, and its bits on CPUs and on a GPU."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cpu_cases import AWKWARD_SIZES, Output, Results, run_everywhere, same_bits
from cuda_row_cases import CUDA, check_compiles, for_each_architecture, random
from guarded import Guarded
from same_bits import assert_same_bits

from all_pairs import all_pairs
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda.array import ArrayError
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.scalars.cuda import PROGRAM, scale_cuda, softcap_cuda
from coldstream.kernels.scalars.reference import softcap, softcap_exact

Runtimes = list[_csrc.Runtime]
CAP = 30.0
FACTOR = 2816**0.5
CPU = torch.device("cpu")


def logits(rows: int, cols: int) -> torch.Tensor:
    """From tiny ones to those that the cap holds, and what no model should give."""
    values = random(rows * cols, rows, cols, scale=40)
    odd = torch.tensor([0.0, -0.0, 1e-30, 1e-4, -1e4, 3e38, torch.inf, -torch.inf])
    values.flatten()[: len(odd)] = odd[: values.numel()]
    return values


def test_the_definition_is_the_formula_but_for_rounding() -> None:
    values = logits(40, 100).flatten()[9:]
    torch.testing.assert_close(softcap_exact(values, CAP), softcap(values, CAP), rtol=1e-6, atol=5e-6)


def test_a_cap_keeps_the_order_of_logits_and_their_bound() -> None:
    """To the last bit: equal ones may come of different ones, and never the other order."""
    values = torch.cat((torch.linspace(-200, 200, 200_001), random(1, 1, 100_000, scale=30)[0])).sort().values
    capped = softcap_exact(values, CAP)
    assert (capped.diff() >= -4e-6).all()
    assert capped.abs().max() <= CAP
    assert softcap_exact(torch.tensor([torch.inf, -torch.inf, torch.nan]), CAP).isnan().sum() == 1


@all_pairs(rows=[1, 3], size=[*AWKWARD_SIZES, 5000])
def test_on_a_cpu(runtimes: Runtimes, rows: int, size: int) -> None:
    x = logits(rows, size)

    def call(runtime: _csrc.Runtime) -> Results:
        capped, scaled = Output(rows, size), Output(rows, size)
        _csrc.softcap(runtime, x, CAP, capped.rows)
        _csrc.scale(runtime, x, FACTOR, scaled.rows)
        return capped.checked(), scaled.checked()

    capped, scaled = run_everywhere(call, runtimes)
    assert same_bits(capped, softcap_exact(x, CAP))
    assert same_bits(scaled, ReferenceOps(exact=True).scale(x, FACTOR))


def test_a_cpu_writes_in_place_and_keeps_what_is_no_number() -> None:
    ops, x = CpuOps(1), logits(3, 100).numpy()
    x[1, 3] = np.nan
    for call in (lambda y: ops.softcap(y, CAP), lambda y: ops.scale(y, FACTOR)):
        y = x.copy()
        assert call(y) is y
        assert (y != x).sum() > 100
        assert np.isnan(y).sum() == 1


def test_a_cap_of_nothing_is_refused(fastest: _csrc.Runtime) -> None:
    x = torch.zeros(2, 8).numpy()
    with pytest.raises(ValueError, match="a cap of 0"):
        _csrc.softcap(fastest, x, 0.0, x)


def check(rows: int, cols: int, device: torch.device) -> None:
    """Rows may be apart, and what lies between them stays."""
    x = logits(rows, cols)
    for call, expected in (
        (lambda y: softcap_cuda(y, CAP), softcap_exact(x, CAP)),
        (lambda y: scale_cuda(y, FACTOR), ReferenceOps(exact=True).scale(x, FACTOR)),
    ):
        out = Guarded(rows, cols, device=device, gap=4)
        out.tensor.copy_(x)
        call(out.tensor)
        assert_same_bits(out.checked(), expected)


@pytest.mark.usefixtures("host")
@all_pairs(rows=[1, 3], cols=[1, 63, 256, 300])
def test_on_a_gpu_of_the_host(rows: int, cols: int) -> None:
    check(rows, cols, CPU)


@pytest.mark.gpu
@all_pairs(rows=[1, 3, 64], cols=[1, 63, 2816, 262144])
def test_on_a_gpu(rows: int, cols: int) -> None:
    check(rows, cols, CUDA)


@pytest.mark.parametrize("call", [scale_cuda, softcap_cuda])
def test_columns_that_are_apart_are_refused(call: Callable[[torch.Tensor, float], None]) -> None:
    with pytest.raises(ArrayError, match="columns 2 apart"):
        call(torch.zeros(3, 8)[:, ::2], 2.0)


@for_each_architecture
def test_it_compiles(arch: str) -> None:
    check_compiles(PROGRAM, arch)
