"""Work that is recorded once and launched again as a whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from coldstream.errors import ColdstreamError
from coldstream.garbage import paused
from coldstream.kernels.cuda.runtime import streams
from coldstream.kernels.cuda.runtime.calls import attach, begin_deferring, core_errors, end_deferring

Outputs = TypeVar("Outputs")

MODE: Final = "thread_local"  # other threads may allocate and wait meanwhile


class Graph:
    """Recorded work. It reads and writes the memory that was there, which the caller keeps in place."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @classmethod
    def capture(cls, step: Callable[[], Outputs]) -> "tuple[Graph, Outputs]":
        """Records what `step` queues to the current stream, and to streams that join it, without running it.

        The step must neither allocate nor wait; the kernels that it launches are loaded already. Memory that
        it lets go is freed behind the recording. Raises as the step, DeviceError, OutOfMemoryError.
        """
        with paused(), _deferred():
            core, outputs = _recorded(step)
        return cls(core), outputs

    def launch(self) -> None:
        """Queues the work to the current stream."""
        attach()
        with core_errors():
            self._core.launch(streams.current_stream().core)


def _recorded(step: Callable[[], Outputs]) -> tuple[Any, Outputs]:
    """The graph of cuda.core, and what the step returns."""
    stream = streams.Stream()
    with core_errors():
        builder = stream.core.create_graph_builder().begin_building(MODE)
    try:
        with streams.on_stream(stream):
            outputs = step()
    except BaseException:
        with suppress(ColdstreamError), core_errors():  # the step's own error is the one to tell
            builder.end_building()
        builder.close()
        raise
    with core_errors():
        graph = builder.end_building().complete()
        builder.close()
    return graph, outputs


@contextmanager
def _deferred() -> Iterator[None]:
    begin_deferring()
    try:
        yield
    finally:
        end_deferring()
