"""What a launch asks the driver for, and which kernels a device gets."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver

from coldstream.kernels.cuda import program
from coldstream.kernels.cuda.compiler import MachineCode
from coldstream.kernels.cuda.program import CudaProgram, Kernel
from coldstream.kernels.cuda.runtime import calls
from host_driver import DONE, HostDriver

ATTRIBUTES = driver.CUlaunchAttributeID


class NotedDriver(SimpleNamespace):
    """The driver, whose launches are only noted."""

    def __init__(self) -> None:
        super().__init__(configs=[])

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def cuModuleLoadData(self, cubin: bytes) -> tuple[object, object]:  # noqa: N802
        return DONE, object()

    def cuModuleGetFunction(self, module: object, name: bytes) -> tuple[object, object]:  # noqa: N802
        return DONE, object()

    def cuLaunchKernelEx(self, config: Any, *_: object) -> tuple[object]:  # noqa: N802
        self.configs.append(config)
        return (DONE,)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> NotedDriver:
    made = NotedDriver()
    monkeypatch.setattr(program, "driver", made)
    return made


def attributes_of(noted: NotedDriver, **options: Any) -> dict[object, Any]:
    """Those of a launch of eight blocks, by their ids."""
    with HostDriver().installed():
        Kernel(None, "kernel").launch((8, 1, 1), 32, (), **options)
    config = noted.configs[-1]
    assert config.numAttrs == len(config.attrs)
    return {each.id: each.value for each in config.attrs}


def test_a_plain_launch_has_no_attributes(noted: NotedDriver) -> None:
    assert attributes_of(noted) == {}


def test_blocks_that_wait_for_each_other_are_launched_together(noted: NotedDriver) -> None:
    attributes = attributes_of(noted, together=True)
    assert attributes.keys() == {ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_COOPERATIVE}
    assert attributes.popitem()[1].cooperative == 1


def test_clusters_are_of_adjacent_blocks(noted: NotedDriver) -> None:
    attributes = attributes_of(noted, together=True, cluster=4)
    size = attributes.pop(ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
    assert (size.x, size.y, size.z) == (4, 1, 1)
    assert attributes.keys() == {ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_COOPERATIVE}


def test_each_device_has_kernels_of_its_own(noted: NotedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded once, for its architecture, where it is current."""
    compiled: list[tuple[int, tuple[str, ...]]] = []

    def compile_together(source: Path, instances: Any, arch: str) -> tuple[MachineCode, ...]:
        compiled.append((calls.device_index(), tuple(instances)))
        return tuple(MachineCode(b"", name) for name in instances)

    monkeypatch.setattr(program, "compile_together", compile_together)
    monkeypatch.setattr(program, "kept_together", lambda *_: None)
    found = CudaProgram(Path("some.cu"), ("first", "second"))
    with HostDriver().installed():
        one = found.kernel("first")
        with calls.on_device(2):
            other = found.kernel("first")
            assert found.kernel("first") is other is not one
            assert found.kernel("second") is not found.kernel("first")
        assert found.kernel("first") is one
    assert compiled == [(0, ("first", "second")), (2, ("first", "second"))]


def test_a_thread_works_on_its_own_device() -> None:
    seen = []
    with HostDriver().installed():
        with suppress(RuntimeError), calls.on_device(1):
            seen.append(calls.device_index())
            raise RuntimeError
        seen.append(calls.device_index())
    assert seen == [1, calls.DEVICE]
