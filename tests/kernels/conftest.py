from collections.abc import Iterator

import cpu_cases
import pytest
from host_device import HostDevice

from coldstream.kernels import _csrc


@pytest.fixture(scope="session")
def runtimes() -> list[_csrc.Runtime]:
    return cpu_cases.all_runtimes()


@pytest.fixture(scope="session")
def fastest() -> _csrc.Runtime:
    return _csrc.Runtime(2)


@pytest.fixture(scope="session")
def compiled_for_the_host(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    return HostDevice(tmp_path_factory.mktemp("host-kernels"))


@pytest.fixture
def host(compiled_for_the_host: HostDevice) -> Iterator[HostDevice]:
    """Inside a test, the GPU's kernels are launched on the host."""
    with compiled_for_the_host.installed():
        yield compiled_for_the_host
