"""A second GPU on the host, whose kernels run while those of the first do."""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coldstream.kernels.cuda import device as cuda_device
from coldstream.kernels.cuda import limits
from coldstream.kernels.cuda.driver import MIN_CUDA, Driver, DriverDevice
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import calls, graphs, streams
from host_device import HostDevice, HostKernel
from host_driver import CAPABILITY, TOTAL_BYTES, HostEvent, HostStream

SECOND = 1
_DEVICE = DriverDevice("the host", CAPABILITY, TOTAL_BYTES)


class SecondDevice(HostDevice):
    """One that compiles nothing anew: its libraries are copies, in `copies`, of those of a `HostDevice`.

    A library keeps the state of its running launch, so that each device needs one of its own. Launched graphs
    run in their order on a thread.
    """

    def __init__(self, directory: Path, copies: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self._copies = copies
        self._worker = ThreadPoolExecutor(1)
        self.queued: list[Future[None]] = []

    def _compiled(self, name: str, sources: Sequence[Path], options: Sequence[str | Path]) -> Path:
        file = super()._compiled(name, sources, options)
        if file.suffix != ".so":
            return file
        return Path(shutil.copy(file, self._copies))

    def queue(self, recorded: Any) -> None:
        """Runs a graph of the host's driver behind those before."""
        self.queued.append(self._worker.submit(recorded.launch, None))

    def synchronize(self) -> None:
        """Waits for all that is queued, and raises its first error."""
        for each in self.queued:
            each.result()
        self.queued.clear()

    def close(self) -> None:
        self._worker.shutdown()


class _Graph:
    """In place of a graph of the second device."""

    def __init__(self, device: SecondDevice, recorded: Any) -> None:
        self._device, self._recorded = device, recorded

    def launch(self, stream: object) -> None:
        self._device.queue(self._recorded)


@contextmanager
def beside(host: HostDevice, copies: Path) -> Iterator[SecondDevice]:
    """Inside, the runtime has a second device, and both wait as long as GPUs do. `host` is installed."""
    second = SecondDevice(host.directory, copies)
    second.driver = host.driver
    cards = [host, second]

    def kernel(program: CudaProgram, instance: str) -> HostKernel:
        return HostKernel(cards[calls.device_index()], program, instance)

    def ended(recording: list[Callable[[], object]]) -> Any:
        recorded = host.driver.ended(recording)
        return recorded if calls.device_index() == calls.DEVICE else _Graph(second, recorded)

    class Stream(HostStream):
        """Of the device that is current when it is made."""

        def __init__(self, core: object = None) -> None:
            super().__init__(core)
            self._is_second = calls.device_index() == SECOND

        def synchronize(self) -> None:
            super().synchronize()
            if self._is_second:
                second.synchronize()

    class Event(HostEvent):
        def query(self) -> bool:
            return calls.device_index() != SECOND or all(each.done() for each in second.queued)

    with pytest.MonkeyPatch.context() as patch:
        for card in cards:
            patch.setattr(card, "keeps_time", True)
        patch.setattr(CudaProgram, "kernel", kernel)
        patch.setattr(limits, "_limits_of", lambda index: cards[index].limits)
        patch.setattr(graphs, "_ended", ended)
        patch.setattr(streams, "Stream", Stream)
        patch.setattr(streams, "Event", Event)
        patch.setattr(cuda_device, "find_driver", lambda: Driver(MIN_CUDA, 0, (_DEVICE, _DEVICE)))
        try:
            yield second
        finally:
            second.close()


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Does `work` on the second device, on another thread. Its errors are those of the block."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with calls.on_device(SECOND):
                work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:
        raise failures[0]
