"""Each operation on sixteen lanes means in every tier what it means in plain C++.

Whole kernels cannot show all of it: a NaN that the greater of two numbers loses or keeps spreads by other
ways as well. The operations are compiled for this machine, by themselves.
"""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.kernels import _csrc

HOST = Path(__file__).parents[1] / "host"
CSRC = Path(__file__).parents[2] / "src/coldstream/kernels/csrc"
AVX2 = ("-mavx2", "-mfma", "-mf16c")
OPTIONS = {"avx2": AVX2, "avx512": (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"), "neon": ()}
TIERS = [tier for tier in _csrc.supported_tiers() if tier in OPTIONS]
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0, 1e-40, -1e-40, 3e38, -3e38)

lanes = st.lists(st.sampled_from(SPECIAL), min_size=16, max_size=16)


@pytest.fixture(scope="module", params=TIERS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """By the compiler for this machine, which an emulated one has under its full name."""
    path = tmp_path_factory.mktemp("vec16") / f"{request.param}.so"
    compiler = shutil.which(f"{platform.machine()}-linux-gnu-g++") or "c++"
    options = ("-std=c++20", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-shared", f"-I{CSRC}")
    tier = f'-DTIER="ops/vec16_{request.param}.inl"'
    command = [compiler, *options, *OPTIONS[request.param], tier, str(HOST / "vec16.cpp"), "-o", str(path)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path))


def operated(library: ctypes.CDLL, a: list[float], b: list[float], left: int, *, by_tier: bool) -> np.ndarray:
    out = np.zeros((11, 16), np.float32)
    inputs = [np.array(values, np.float32) for values in (a, b)]
    addresses = [ctypes.c_void_p(values.ctypes.data) for values in (*inputs, out)]
    library.operate(ctypes.c_bool(by_tier), *addresses[:2], ctypes.c_int64(left), addresses[2])
    return out


@pytest.mark.sharded(of="kernels")
@given(a=lanes, b=lanes, left=st.integers(0, 17))
def test_lanes_have_the_bits_of_the_definition(
    library: ctypes.CDLL, a: list[float], b: list[float], left: int
) -> None:
    """Any NaN equals any other."""
    want, got = (operated(library, a, b, left, by_tier=by_tier) for by_tier in (False, True))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(want[want == 0]))
