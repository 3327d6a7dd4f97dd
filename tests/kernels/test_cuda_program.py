"""What a launch asks the driver for."""

from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver

from coldstream.kernels.cuda import program
from coldstream.kernels.cuda.program import Kernel
from host_driver import DONE, HostDriver

ATTRIBUTES = driver.CUlaunchAttributeID


class NotedDriver(SimpleNamespace):
    """The driver, whose launches are only noted."""

    def __init__(self) -> None:
        super().__init__(configs=[])

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

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
