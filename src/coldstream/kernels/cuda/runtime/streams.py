"""Streams and events. A thread's launches and copies go to its current stream: the default one, or another.

The default stream is the driver's legacy one. Others do not wait for it, nor it for them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cuda.core import LEGACY_DEFAULT_STREAM, EventOptions, StreamOptions

from coldstream.kernels.cuda.runtime.calls import attach, core_errors, device


class Event:
    """A place in a stream, which has been reached once all work before it has ended.

    One that was never recorded counts as reached. has_time: whether `milliseconds_since` may be asked.
    """

    def __init__(self, *, has_time: bool = False) -> None:
        attach()
        with core_errors():
            self._event = device().create_event(EventOptions(timing_enabled=has_time))

    def record(self, stream: "Stream | None" = None) -> None:
        """Queues it, to the current stream by default. The place before is forgotten."""
        with core_errors():
            (stream or current_stream()).core.record(self._event)

    def query(self) -> bool:
        """Whether it has been reached. Raises DeviceError if work before it failed."""
        attach()
        with core_errors():
            return bool(self._event.is_done)

    def synchronize(self) -> None:
        """Returns when it has been reached. Raises DeviceError if work before it failed."""
        attach()
        with core_errors():
            self._event.sync()

    def milliseconds_since(self, begin: "Event") -> float:
        """From `begin` to this one; both have been reached."""
        with core_errors():
            return float(self._event - begin._event)


class Stream:
    """Work in order, beside that of other streams.

    core: of cuda.core. handle: the driver's, for calls of cuda.bindings.
    """

    def __init__(self, core: Any = None) -> None:
        """A new one, unless `core` is given."""
        if core is None:
            attach()
            with core_errors():
                core = device().create_stream(options=StreamOptions(nonblocking=True))
        self.core = core
        self.handle = int(core.handle)

    def synchronize(self) -> None:
        """Returns when its work has ended. Raises DeviceError if some failed."""
        attach()
        with core_errors():
            self.core.sync()

    def wait_event(self, event: Event) -> None:
        """Work queued from now on waits for the event."""
        attach()
        with core_errors():
            self.core.wait(event._event)

    def wait_stream(self, other: "Stream") -> None:
        """Work queued from now on waits for what is queued in the other stream now."""
        attach()
        with core_errors():
            self.core.wait(other.core)


class _Current(threading.local):
    stream: Stream | None = None


_current = _Current()
_DEFAULT: Final = Stream(LEGACY_DEFAULT_STREAM)


def current_stream() -> Stream:
    """That of the calling thread, which gets the context if it lacks one."""
    stream = _current.stream
    if stream is None:
        attach()
        stream = _current.stream = _DEFAULT
    return stream


def default_stream() -> Stream:
    """That of threads which have chosen none."""
    return _DEFAULT


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Inside, it is the calling thread's current one."""
    before, _current.stream = current_stream(), stream
    try:
        yield
    finally:
        _current.stream = before
