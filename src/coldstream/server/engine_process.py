"""The engine process: opens a model, then computes what comes over a socket, in one thread.

Started by the API process as `python -m coldstream.server.engine_process SOCKET PARENT VERSION`, never
forked. It ends when the socket closes and when its parent dies. Ctrl-C and SIGTERM are the parent's affair,
which lets requests finish first. Events that the parent does not read pile up to `MAX_UNSENT_BYTES`; then no
step is computed until it reads again.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn, Protocol

from coldstream import __version__
from coldstream.engine.engine_statistics import LiveState
from coldstream.engine.events import Event, Failed
from coldstream.engine.submission import Submission
from coldstream.errors import (
    ColdstreamError,
    ConfigError,
    GenerationFault,
    ModelChangedError,
    host_memory_errors,
    out_of_resources,
)
from coldstream.garbage import starting
from coldstream.kernels.cuda import ahead
from coldstream.server.codec import ProtocolError
from coldstream.server.messages import (
    AT_REST,
    Accepted,
    Alive,
    Cancel,
    Count,
    Counted,
    Died,
    FromEngine,
    Loading,
    Open,
    Ready,
    Refused,
    ToEngine,
    ToEngineReader,
    framed,
    joined,
)
from coldstream.server.served_model import EngineFacts

MAX_UNSENT_BYTES: Final = 1 << 20
ALIVE_S: Final = 1.0  # between signs of life while steps give no events
PROGRESS_S: Final = 0.1  # between two messages about loading
CHECK_S: Final = 2.0  # between two looks at the model's file while nothing is to be computed
_READ_BYTES: Final = 1 << 18
_PR_SET_PDEATHSIG: Final = 1

OpenProgress = Callable[[str, int, int], None]


class Computes(Protocol):
    """What the process needs of `engine.Engine`."""

    @property
    def is_idle(self) -> bool: ...

    def add(self, submission: Submission) -> None: ...

    def cancel(self, request_id: int) -> None: ...

    def step(self) -> Sequence[Event]: ...

    def check_file(self) -> None: ...

    def rest(self) -> bool: ...

    def live(self) -> LiveState: ...


OpenEngine = Callable[[Open, OpenProgress], AbstractContextManager[tuple[Computes, EngineFacts]]]


class _ClosedError(Exception):
    """The parent has closed the socket, or is gone."""


class _Connection:
    """The socket to the parent: messages in, and frames out that wait until the socket takes them."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._reader = ToEngineReader()
        self._unsent: deque[bytes] = deque()
        self._sent_of_first = 0
        self.num_unsent = 0  # bytes
        self.last_sent = time.monotonic()

    def send(self, *messages: FromEngine) -> None:
        """Queue messages and send what the socket takes, so that those of a step wake the parent once.

        Raises ProtocolError, `_ClosedError`.
        """
        frames = b"".join(framed(message, FromEngine) for message in messages)
        if frames:
            self._unsent.append(frames)
            self.num_unsent += len(frames)
            self.last_sent = time.monotonic()
            self._flush()

    def flush(self) -> None:
        """Wait until all is sent. Raises `_ClosedError`."""
        while self._unsent:
            self._wait(None)
            self._flush()

    def received(self, timeout_s: float | None) -> list[ToEngine]:
        """What has come, after waiting for up to `timeout_s` (None: for as long as it takes) for something,
        or for room for what is unsent. Raises ProtocolError, `_ClosedError`.
        """
        if self._wait(timeout_s) and self._unsent:
            self._flush()
        try:
            data = self._channel.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise _ClosedError from error
        if not data:
            raise _ClosedError
        return list(self._reader.feed(data))

    def _wait(self, timeout_s: float | None) -> bool:
        """Whether anything has come, or what is unsent has room."""
        poll = select.poll()  # and not `select.select`, which takes small descriptors only
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._channel.send(memoryview(self._unsent[0])[self._sent_of_first :])
                self.num_unsent -= sent
                self._sent_of_first += sent
                if self._sent_of_first == len(self._unsent[0]):
                    self._unsent.popleft()
                    self._sent_of_first = 0
        except BlockingIOError:
            return
        except OSError as error:
            raise _ClosedError from error


def serve(channel: socket.socket, open_engine: OpenEngine, version: str = __version__) -> int:
    """Serve the parent at the other end of `channel` until it closes; the process's exit code.

    version: the parent's. An error of opening or of the whole engine is the last thing that is sent.
    """
    connection = _Connection(channel)
    try:
        try:
            _check_version(version)
            message = _first_message(connection)
            with host_memory_errors(), open_engine(message, _throttled(connection)) as (engine, facts):
                connection.send(Ready(facts))
                _serve(connection, engine)
        except ColdstreamError as error:
            connection.send(Died(error))
            connection.flush()
            return error.exit_code
        except _ClosedError:
            raise
        except Exception as error:
            cause = out_of_resources(error)
            connection.send(Died(cause or GenerationFault(f"unexpected {type(error).__name__}: {error}")))
            connection.flush()
            raise
    except _ClosedError:
        return 0


def _check_version(version: str) -> None:
    """The package may have been upgraded under a running server, whose messages would be others."""
    if version != __version__:
        raise ConfigError(
            f"coldstream was upgraded from {version} to {__version__} while its server was running: start "
            "the server again"
        )


def _first_message(connection: _Connection) -> Open:
    while not (messages := connection.received(None)):
        continue
    if len(messages) != 1 or not isinstance(messages[0], Open):
        raise ProtocolError("the first message does not say what to open")
    return messages[0]


def _throttled(connection: _Connection) -> OpenProgress:
    """Reports to the parent how loading goes, now and then; what is new, at once."""
    last = ("", float("-inf"))

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if what != last[0] or done >= total or now - last[1] >= PROGRESS_S:
            last = (what, now)
            connection.send(Loading(what, done, total))

    return report


def _serve(connection: _Connection, engine: Computes) -> NoReturn:
    """Raises ModelChangedError once the model's file has changed so that no request can be computed."""
    has_news = False  # counts that the parent does not know
    while True:
        if engine.is_idle:
            engine.check_file()
        is_due = not engine.is_idle and connection.num_unsent < MAX_UNSENT_BYTES
        may_rest = engine.is_idle and engine.rest()
        messages = connection.received(0 if is_due or may_rest else CHECK_S)
        for message in messages:
            _take(message, connection, engine)
        if has_news and engine.is_idle and not messages and not may_rest:
            has_news = False
            connection.send(Counted(AT_REST, engine.live()))  # they go on with the next engine
        if is_due and not engine.is_idle:
            has_news = True
            events = engine.step()
            connection.send(*joined(events))
            if any(isinstance(each, Failed) and isinstance(each.error, ModelChangedError) for each in events):
                engine.check_file()
            if time.monotonic() - connection.last_sent >= ALIVE_S:
                connection.send(Alive())


def _take(message: ToEngine, connection: _Connection, engine: Computes) -> None:
    match message:
        case Submission(request_id=request_id):
            try:
                engine.add(message)
            except ColdstreamError as error:
                connection.send(Refused(request_id, error))
            else:
                connection.send(Accepted(request_id))
        case Cancel(request_id=request_id):
            engine.cancel(request_id)
        case Count(ticket=ticket):
            connection.send(Counted(ticket, engine.live()))
        case Open():
            raise ProtocolError("a model is open already")


def die_with(parent: int) -> None:
    """Let the kernel end this process when the one with this id does, whatever is being computed then."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def run(arguments: Sequence[str], open_engine: OpenEngine) -> int:
    """The process's main function.

    arguments: the numbers of the inherited socket and of the parent process, and the parent's version.
    """
    descriptor, parent = map(int, arguments[:2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with(parent)
    with socket.socket(fileno=descriptor) as channel:
        return serve(channel, open_engine, arguments[2])


@contextmanager
def open_real(message: Open, progress: OpenProgress) -> Iterator[tuple[Computes, EngineFacts]]:
    """Open the model and an engine on it; both are closed at the end of the block. Raises as `open_model`."""
    with starting():
        if message.config.device != "cpu":
            ahead.begin()
        from coldstream.engine.cache_tiers import CacheTiers, open_tiers
        from coldstream.engine.engine import Engine
        from coldstream.engine.opened_model import open_model

        cache = message.cache
        settings = CacheTiers(cache.ram_bytes, None if cache.folder is None else Path(cache.folder))
        opened = open_model(message.config, progress=progress, prompt_cache_bytes=settings.ram_bytes)
    with (
        closing(opened),
        closing(Engine(opened, message.limits, tiers=open_tiers(settings, opened))) as engine,
    ):
        opened.grammars.prepare()
        yield engine, EngineFacts.of(opened)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], open_real))
