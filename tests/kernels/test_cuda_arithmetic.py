"""The scalar functions of the GPU's kernels equal the exact reference, bit for bit; compiled for the host."""

import pytest
import torch
from host_code import HostCode
from same_bits import assert_same_bits

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic import reference
from coldstream.kernels.swiglu.reference import swiglu_exact

SMALL = (0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 2.0**-100, 0.34657359)
LARGE = (3.4028235e38, -3.4028235e38, torch.inf, -torch.inf, -87.33655, -87.33654, 88.37626, 88.4)
EXTREMES = (*SMALL, *LARGE, torch.nan)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> HostCode:
    return HostCode(QuantType.F32, tmp_path_factory.mktemp("host"))


def floats(count: int) -> torch.Tensor:
    """Values of every magnitude, the extremes first."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 3, (count,), generator=generator)
    x[: len(EXTREMES)] = torch.tensor(EXTREMES)
    return x


@pytest.mark.parametrize(
    ("name", "expected"),
    [("exp_of", reference.exp), ("silu", reference.silu), ("sigmoid", reference.sigmoid)],
    ids=["exp", "silu", "sigmoid"],
)
def test_functions_of_one_value(name: str, expected: object, code: HostCode) -> None:
    x = floats(1 << 15)
    assert_same_bits(code.of_floats(name, x), expected(x))  # type: ignore[operator]


def test_one_over_the_root(code: HostCode) -> None:
    x = floats(1 << 15).abs()
    assert_same_bits(code.of_floats("one_over_sqrt", x), reference.inverse_sqrt(x))


def test_swiglu(code: HostCode) -> None:
    gate, up = floats(1 << 15), floats(1 << 15).flip(0)
    assert_same_bits(code.of_floats("swiglu", gate, up), swiglu_exact(gate, up))


def test_swiglu_of_gates_near_and_beyond_the_limits_of_exp(code: HostCode) -> None:
    gate = torch.linspace(-120, 120, 1 << 14)
    up = torch.randn(len(gate), generator=torch.Generator().manual_seed(0))
    assert_same_bits(code.of_floats("swiglu", gate, up), swiglu_exact(gate, up))


@pytest.mark.parametrize(
    ("name", "lanes", "expected"),
    [("sum_eights", 8, reference.sum_of_eight), ("sum_sixteens", 16, reference.sum_of_sixteen)],
    ids=["eight", "sixteen"],
)
def test_sums_of_lanes(name: str, lanes: int, expected: object, code: HostCode) -> None:
    x = torch.randn(64, lanes, generator=torch.Generator().manual_seed(lanes)) * 1000
    sums = expected(x)  # type: ignore[operator]
    assert not torch.equal(sums, x.sum(dim=1)), "the order must matter"
    assert_same_bits(code.of_floats(name, x, each=lanes), sums)
