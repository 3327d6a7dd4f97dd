"""A second GPU on the host, whose kernels run while those of the first do."""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coldstream.kernels.cuda import limits
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import calls
from host_device import HostDevice, HostKernel

SECOND = 1


class SecondDevice(HostDevice):
    """One that compiles nothing anew: its libraries are copies, in `copies`, of those of a `HostDevice`.

    A library keeps the state of its running launch, so that each device needs one of its own.
    """

    def __init__(self, directory: Path, copies: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self._copies = copies

    def _compiled(self, name: str, sources: Sequence[Path], options: Sequence[str | Path]) -> Path:
        file = super()._compiled(name, sources, options)
        if file.suffix != ".so":
            return file
        return Path(shutil.copy(file, self._copies))


@contextmanager
def beside(host: HostDevice, copies: Path) -> Iterator[SecondDevice]:
    """Inside, the runtime has a second device, and both wait as long as GPUs do. `host` is installed."""
    second = SecondDevice(host.directory, copies)
    second.driver = host.driver
    cards = [host, second]

    def kernel(program: CudaProgram, instance: str) -> HostKernel:
        return HostKernel(cards[calls.device_index()], program, instance)

    with pytest.MonkeyPatch.context() as patch:
        for card in cards:
            patch.setattr(card, "keeps_time", True)
        patch.setattr(CudaProgram, "kernel", kernel)
        patch.setattr(limits, "_limits_of", lambda index: cards[index].limits)
        yield second


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
