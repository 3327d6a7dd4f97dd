import cpu_cases
import pytest

from coldstream.kernels import _csrc


@pytest.fixture(scope="session")
def runtimes() -> list[_csrc.Runtime]:
    return cpu_cases.all_runtimes()


@pytest.fixture(scope="session")
def fastest() -> _csrc.Runtime:
    return _csrc.Runtime(2)
