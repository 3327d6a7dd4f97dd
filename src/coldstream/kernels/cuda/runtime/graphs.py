"""Work that is recorded once and launched again, as a whole or in pieces between which the host acts."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
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


class Pieces:
    """Recorded work in its order, and what the host does in between."""

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts = parts

    @classmethod
    def record(cls, step: Callable[[], Outputs]) -> "tuple[Pieces, Outputs]":
        """Records what `step` queues, as `Graph.capture` does, and runs it: each piece once it is recorded.

        Where the host has to act, the step calls `recording().pause`. Raises as `Graph.capture`.
        """
        recording = _current.recording = Recording()
        try:
            with paused():
                return cls(recording.parts), recording.run(step)
        finally:
            _current.recording = None

    def launch(self) -> None:
        """Queues the work to the current stream, and has the host act in between."""
        for part in self._parts:
            part()


class Recording:
    """Work that is being recorded in pieces. parts: those that are complete."""

    def __init__(self) -> None:
        self.parts: list[Callable[[], None]] = []
        self._outer, self._stream = streams.current_stream(), streams.Stream()
        self._builder: Any = None  # of the piece that is being recorded

    def run(self, step: Callable[[], Outputs]) -> Outputs:
        """What the step returns, once all that it queued is recorded and launched."""
        with streams.on_stream(self._stream):
            self._begin()
            try:
                outputs = step()
                self._end()
            finally:
                self._give_up()
        return outputs

    def pause(self, act: Callable[[], None]) -> None:
        """Has the host `act` here, now and whenever the pieces are launched.

        It may wait and launch, and holds no memory of the step.
        """
        self._end()
        self._do(act)
        self._begin()

    def pause_with(self, again: Callable[[], None], act: Callable[[Graph], None]) -> None:
        """Likewise, with a graph of what `again` queues. `act` launches it as often as it likes."""
        self._end()
        graph, _ = Graph.capture(again)
        self._do(partial(act, graph))
        self._begin()

    def _begin(self) -> None:
        begin_deferring()
        try:
            self._builder = _begun(self._stream)
        except BaseException:
            end_deferring()
            raise

    def _end(self) -> None:
        """Completes a piece and launches it."""
        builder, self._builder = self._builder, None
        try:
            core = _ended(builder)
        finally:
            end_deferring()
        self._do(Graph(core).launch)

    def _do(self, part: Callable[[], None]) -> None:
        with streams.on_stream(self._outer):
            part()
        self.parts.append(part)

    def _give_up(self) -> None:
        """Drops a piece that is incomplete."""
        if self._builder is not None:
            _dropped(self._builder)
            end_deferring()


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()


def recording() -> Recording | None:
    """That of the calling thread; None: work that it queues runs at once, or is captured as a whole."""
    return _current.recording


def between(act: Callable[[], None]) -> None:
    """Has the host act between what was queued and what will be: at once, or in a recording."""
    if (current := recording()) is not None:
        current.pause(act)
    else:
        act()


def _recorded(step: Callable[[], Outputs]) -> tuple[Any, Outputs]:
    """The graph of cuda.core, and what the step returns."""
    stream = streams.Stream()
    builder = _begun(stream)
    try:
        with streams.on_stream(stream):
            outputs = step()
    except BaseException:
        _dropped(builder)
        raise
    return _ended(builder), outputs


def _begun(stream: streams.Stream) -> Any:
    """What records a stream's work from now on."""
    with core_errors():
        return stream.core.create_graph_builder().begin_building(MODE)


def _ended(builder: Any) -> Any:
    """The graph of cuda.core."""
    with core_errors():
        graph = builder.end_building().complete()
        builder.close()
    return graph


def _dropped(builder: Any) -> None:
    """Ends a recording that is not used."""
    with suppress(ColdstreamError), core_errors():  # the step's own error is the one to tell
        builder.end_building()
    builder.close()


@contextmanager
def _deferred() -> Iterator[None]:
    begin_deferring()
    try:
        yield
    finally:
        end_deferring()
