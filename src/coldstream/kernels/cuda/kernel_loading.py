"""Kernels that are compiled and loaded beside other work, those that are needed first before others.

What was compiled before is loaded by one thread: its work is short, and much of it holds the interpreter's
lock. The rest goes to a thread for each core. Who asks a program for one of the kernels waits for it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self

from coldstream.kernels.cuda.program import CudaProgram, Pending

Progress = Callable[[int, int], None]
Kernels = Iterable[tuple[CudaProgram, str]]


class KernelLoading:
    """Loads kernels for the current device, beside the caller, until `close`."""

    def __init__(self, first: Kernels, *later: Kernels) -> None:
        """first: those that are waited for by `wait_for_first`. later: others, in the order of their need."""
        self._first, self._later = _pending(first), [each for group in later for each in _pending(group)]
        self._reader, self._compilers = ThreadPoolExecutor(1), ThreadPoolExecutor(os.cpu_count())
        if self._first or self._later:
            self._reader.submit(self._load_kept)

    @classmethod
    @contextmanager
    def beside(cls, kernels: Kernels) -> "Iterator[Self]":
        """Inside, kernels are loaded. At the end they are there. Raises as `wait`."""
        loading = cls(kernels)
        try:
            yield loading
            loading.wait()
        finally:
            loading.close()

    def wait_for_first(self, progress: Progress | None = None) -> None:
        """Returns when the first ones are there; progress is called with (done, total) compilations.

        Raises as `CudaProgram.kernel`.
        """
        for done, pending in enumerate(self._first, start=1):
            _finish(pending)
            if progress is not None:
                progress(done, len(self._first))

    def wait(self) -> None:
        """Returns when all are there. Raises as `CudaProgram.kernel`."""
        for pending in (*self._first, *self._later):
            _finish(pending)

    def close(self) -> None:
        """Gives up what has not begun, and waits for what has."""
        for pending in (*self._first, *self._later):
            pending.give_up()
        self._reader.shutdown()
        self._compilers.shutdown()

    def _load_kept(self) -> None:
        """Loads what was compiled before, and has the rest compiled."""
        for pending in (*self._first, *self._later):
            if pending.load_kept():
                continue
            try:
                self._compilers.submit(pending.load)
            except RuntimeError:  # no thread can be started: who asks for them compiles them
                pending.give_up()


def _pending(kernels: Kernels) -> list[Pending]:
    """Of kernels that no one loads yet, once for those that are compiled together.

    Slow ones come first, or the last of them would be compiled alone while all other cores are idle.
    """
    found = (program.pending(instance) for program, instance in kernels)
    return sorted((each for each in found if each is not None), key=lambda each: not each.program.is_slow)


def _finish(pending: Pending) -> None:
    """Waits for kernels, or for who has taken them. Raises what their loading raised."""
    try:
        pending.future.result()
    except CancelledError:  # given up: who asks for them loads them, and meets their errors
        return
