"""A GPU that computes nothing, for benchmarks of what the host does around its steps.

Its memory is the host's, reserved and never filled. Launches check nothing and do nothing. Copies of what a
step reads or leaves are made, as the host reads their results; those of weights are not. So opening a model
of any size takes seconds, and a step takes what its host takes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest

from coldstream.kernels.cuda import limits, program
from coldstream.kernels.cuda.program import CudaProgram
from tests.host_driver import DONE, HostDriver

LARGEST_COPY: Final = 2**18  # bytes; matrices of experts are larger
LIMITS: Final = limits.DeviceLimits(132, 227 << 10, 228 << 10)  # of an H200


class IdleDriver(HostDriver):
    """`after_graph` is called where a graph is launched."""

    after_graph: Callable[[], None] | None = None
    _mapped = 2**64, 0  # where the file lies, which may be on a slow disk

    def _new_memory(self, num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8)  # which the system backs when it is touched

    def ended(self, recording: Any) -> Any:
        super().ended(recording)
        return _IdleGraph(self)

    def cuMemHostRegister(self, address: int, size: int, flags: object) -> tuple[object]:  # noqa: N802
        first, end = self._mapped
        self._mapped = min(first, address), max(end, address + size)
        return super().cuMemHostRegister(address, size, flags)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[object]:  # noqa: N802
        is_mapped = self._mapped[0] <= int(source) < self._mapped[1]
        return self._copy(target, source, 0 if is_mapped else size)

    def cuMemcpyBatchAsync(self, *_: object) -> tuple[object]:  # noqa: N802
        return (DONE,)  # they are of experts

    def _copy(self, target: Any, source: Any, size: int) -> tuple[object]:
        return super()._copy(target, source, size if size <= LARGEST_COPY else 0)

    def cuMemsetD8Async(self, address: int, byte: int, size: int, stream: int) -> tuple[object]:  # noqa: N802
        return super().cuMemsetD8Async(address, byte, size if size <= LARGEST_COPY else 0, stream)


class _IdleGraph:
    def __init__(self, driver: IdleDriver) -> None:
        self._driver = driver

    def launch(self, stream: object) -> None:
        if self._driver.after_graph is not None:
            self._driver.after_graph()


class _IdleKernel:
    """Its arguments are made ready for the driver, as that takes the host time."""

    def launch(self, grid: Any, block: int, args: Sequence[Any], **options: Any) -> None:
        for arg in args:
            program._as_c(arg)


class IdleDevice:
    """Takes the place of a `HostDevice` of the tests."""

    keeps_time = True
    before_launch: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.driver = IdleDriver()

    @contextmanager
    def installed(self) -> Iterator["IdleDevice"]:
        """Inside, all work of the package for a GPU comes here."""
        with self.driver.installed(), pytest.MonkeyPatch.context() as patch:
            kernel = _IdleKernel()
            patch.setattr(limits, "_limits_of", lambda index: LIMITS)
            patch.setattr(CudaProgram, "kernel", lambda own, instance: kernel)
            yield self
