"""A stream of the pieces of one answer, which any thread may take."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from coldstream.closing import Closing
from coldstream.engine.answer import Request, cancelled_piece
from coldstream.engine.events import Delta, Failed, PromptProgress
from coldstream.engine.request import Piece
from coldstream.engine.shared_engine import SharedEngine
from coldstream.errors import InvalidRequestError, host_memory_errors
from coldstream.forks import OwnProcess


class Stream(Iterator[Piece], Closing):
    """The pieces of one answer. The last has the finish reason and the statistics.

    Nothing is computed before the first piece is asked for. Then the answer is computed beside those of other
    streams and threads; while nobody asks for pieces, nothing is. `close` (also by `with`, or by dropping the
    stream) ends it; after `cancel`, which any thread or signal handler may call, the next piece is the last.
    Threads may hand a stream to each other.
    """

    def __init__(
        self, request: Request, engine: SharedEngine, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """progress: called with (prompt tokens done, in all) while the prompt is computed."""
        self._cancellation = _Cancellation()
        self._pieces = _pieces(request, engine, progress, self._cancellation)
        self._taking = threading.Lock()
        self._process = OwnProcess()
        self._taker: int | None = None  # the thread that uses the pieces now

    def __next__(self) -> Piece:
        self._begin("take a piece of")
        try:
            return next(self._pieces)
        finally:
            self._end()

    def cancel(self) -> None:
        """Finish with reason `cancelled` at the next token, or the next chunk of a long prompt."""
        self._cancellation.request()

    def close(self) -> None:
        """End the answer. The stream then has no last piece.

        In a forked child this does nothing.
        """
        if not self._process.is_here():
            return
        if self._taker != threading.get_ident():
            self.cancel()
        self._begin("close")
        try:
            self._pieces.close()
        finally:
            self._end()

    def _begin(self, what: str) -> None:
        """This thread alone uses the pieces until `_end`."""
        self._process.check()
        if self._taker == threading.get_ident():
            raise InvalidRequestError(f"a function that a stream calls cannot {what} that stream: cancel it")
        self._taking.acquire()
        self._taker = threading.get_ident()

    def _end(self) -> None:
        self._taker = None
        self._taking.release()


class _Cancellation:
    """Outside of the stream: a reference from the pieces to their stream would keep both alive."""

    def __init__(self) -> None:
        self._is_requested = False
        self._cancel: Callable[[], None] | None = None

    def request(self) -> None:
        """Any number of times, from any thread or signal handler."""
        self._is_requested = True
        if self._cancel is not None:
            self._cancel()

    def is_requested(self) -> bool:
        return self._is_requested

    def begin(self, cancel: Callable[[], None]) -> None:
        """From now on a request calls `cancel`; one that came before calls it now."""
        self._cancel = cancel
        if self._is_requested:
            cancel()


def _pieces(
    request: Request,
    engine: SharedEngine,
    progress: Callable[[int, int], None] | None,
    cancellation: _Cancellation,
) -> Generator[Piece, None, None]:
    engine.check()
    if cancellation.is_requested():
        yield cancelled_piece(request)
        return
    total = len(request.prompt_token_ids)
    is_read = progress is None
    with host_memory_errors(), closing(engine.requests()) as mine:
        request_id = mine.add(request, progress=progress is not None)
        cancellation.begin(lambda: mine.cancel(request_id))
        while True:
            event = mine.next_event()
            if isinstance(event, Delta):
                is_first, is_read = not is_read, True
                if is_first and event.piece.token_ids and progress is not None:
                    progress(total, total)
                yield event.piece
                if event.piece.finish_reason is not None:
                    return
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, PromptProgress) and progress is not None:
                progress(event.done, total)
