"""Turns of threads: one request at a time has the model, the others wait in order of arrival.

A turn includes pauses, in which a stream's caller has a piece and nothing computes. It belongs to the thread
that last took a piece; this thread is refused another turn, for which it would wait forever.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coldstream.errors import InvalidRequestError
from coldstream.forks import OwnProcess


class Turns:
    """Hands out turns until `end`. All methods may be called from any thread.

    In a forked child there are no turns: what asks for one raises GenerationFault, and the rest does nothing.
    """

    def __init__(self) -> None:
        self.process = OwnProcess()
        # Its lock is reentrant: a stream that is dropped may end its turn anywhere.
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self._holder: threading.Thread | None = None
        self._is_computing = False
        self._has_ended = False

    @contextmanager
    def turn(self, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Hold the model. False, without holding it, if the wait ended because `is_cancelled`; `wake` makes a
        waiting thread ask.

        Raises InvalidRequestError if this thread has a turn already, or after `end`.
        """
        if not self._take(is_cancelled):
            yield False
            return
        try:
            yield True
        finally:
            if self.process.is_here():
                with self._condition:
                    self._holder, self._is_computing = None, False
                    self._condition.notify_all()

    def pause(self) -> None:
        """Nothing computes in this turn until `resume`."""
        if not self.process.is_here():
            return
        with self._condition:
            self._is_computing = False
            self._condition.notify_all()

    def resume(self) -> None:
        """Compute again; the turn is the calling thread's now. Raises InvalidRequestError after `end`."""
        self.check()
        with self._condition:
            self.check()
            self._holder, self._is_computing = threading.current_thread(), True

    def wake(self) -> None:
        """Make those who wait ask again whether they are cancelled."""
        if not self.process.is_here():
            return
        with self._condition:
            self._condition.notify_all()

    def check(self) -> None:
        """Raises InvalidRequestError after `end`, and GenerationFault in a forked child."""
        self.process.check()
        if self._has_ended:
            raise InvalidRequestError("this LLM is closed")

    def end(self) -> None:
        """Give no more turns, and return when nothing computes.

        Raises InvalidRequestError, and changes nothing, if it is this thread that computes.
        """
        if not self.process.is_here():
            return
        with self._condition:
            if self._is_computing and self._holder is threading.current_thread():
                raise InvalidRequestError("this LLM cannot be closed by a function that its request calls")
            self._has_ended = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._is_computing)

    def _take(self, is_cancelled: Callable[[], bool]) -> bool:
        self.check()
        ticket = object()

        def may_go_on() -> bool:
            is_first = self._holder is None and self._waiting[0] is ticket
            return is_first or self._has_ended or is_cancelled()

        with self._condition:
            if self._holder is threading.current_thread():
                raise InvalidRequestError(
                    "this thread has a stream that is not finished: take its last piece or close it before "
                    "another request"
                )
            self._waiting.append(ticket)
            try:
                self._condition.wait_for(may_go_on)
                self.check()
                if is_cancelled():
                    return False
                self._holder, self._is_computing = threading.current_thread(), True
                return True
            finally:
                self._waiting.remove(ticket)
                self._condition.notify_all()
