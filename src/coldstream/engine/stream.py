"""A stream of the pieces of one answer, which any thread may take."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from coldstream.engine.request import Piece
from coldstream.errors import InvalidRequestError
from coldstream.forks import OwnProcess


class Stream(Iterator[Piece]):
    """The pieces of one answer. The last has the finish reason and the statistics.

    Nothing is computed before the first piece is asked for; then the stream waits until the model is free,
    and has it until it ends. `close` (also by `with`, or by dropping the stream) ends it at once; after
    `cancel`, which any thread or signal handler may call, the next piece is the last. Threads may hand a
    stream to each other; it belongs to the one that last took a piece.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], bool]], Generator[Piece, None, None]],
        wake: Callable[[], None],
    ) -> None:
        """`start(is_cancelled)` generates the pieces; `wake` has a waiting one check `is_cancelled` again."""
        self._cancellation = _Cancellation()
        self._wake = wake
        self._pieces = start(self._cancellation.is_requested)
        self._taking = threading.Lock()
        self._process = OwnProcess()
        self._taker: threading.Thread | None = None

    def __next__(self) -> Piece:
        with self._one_at_a_time("take a piece of"):
            return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def cancel(self) -> None:
        """Finish with reason `cancelled` at the next token, or the next chunk of a long prompt."""
        self._cancellation.request()
        self._wake()

    def close(self) -> None:
        """Release the model. The stream ends without a last piece, once a running step has ended.

        In a forked child this does nothing.
        """
        if not self._process.is_here():
            return
        if self._taker is not threading.current_thread():
            self.cancel()
        with self._one_at_a_time("close"):
            self._pieces.close()

    @contextmanager
    def _one_at_a_time(self, what: str) -> Iterator[None]:
        self._process.check()
        if self._taker is threading.current_thread():
            raise InvalidRequestError(f"a function that a stream calls cannot {what} that stream: cancel it")
        with self._taking:
            self._taker = threading.current_thread()
            try:
                yield
            finally:
                self._taker = None


class _Cancellation:
    """A flag outside of the stream: a reference from the pieces to their stream would keep both alive."""

    def __init__(self) -> None:
        self._requested = False

    def request(self) -> None:
        self._requested = True

    def is_requested(self) -> bool:
        return self._requested
