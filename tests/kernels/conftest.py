from collections.abc import Iterator
from typing import TYPE_CHECKING

import cpu_cases
import pytest

from coldstream.kernels import _csrc

if TYPE_CHECKING:
    from host_driver import HostDriver


@pytest.fixture(scope="session")
def runtimes() -> list[_csrc.Runtime]:
    return cpu_cases.all_runtimes()


@pytest.fixture(scope="session")
def fastest() -> _csrc.Runtime:
    return _csrc.Runtime(2)


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> "Iterator[HostDriver | None]":
    """Inside a test, the runtime has the host's driver, which this is, or that of a GPU, which is None."""
    # Imported here because they need packages that a machine without a GPU need not have.
    from coldstream.kernels.cuda.runtime import calls
    from host_driver import HostDriver

    if request.param == "gpu":
        calls.attach()
        yield None
        return
    with HostDriver().installed() as driver:
        yield driver
