"""EventStream: the events of one request on their way to its reader, within a bound."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from coldstream.engine.events import Delta, Event, Failed
from coldstream.errors import ColdstreamError

MAX_UNREAD_BYTES: Final = 256 << 10  # about so many bytes of unread events; the last event may exceed it
_EVENT_BYTES: Final = 64  # what an event takes beside its text and log-probabilities
_LOGPROB_BYTES: Final = 128


class SlowReaderError(ColdstreamError):
    """Too much of an answer waited to be read; its request was cancelled."""


class EventStream:
    """Events in order, ended by the last one of the last answer or by a failure.

    It has one reader, who calls `aclose` in every case, and either iterates, where a wait may be cancelled
    and begun again, or calls `take` whenever the event that it watches is set.
    """

    def __init__(self, request_id: int, num_answers: int, leave: Callable[["EventStream"], None]) -> None:
        """leave: called once, when the reader leaves before the end."""
        self.request_id = request_id
        self._num_open = num_answers
        self._leave = leave
        self._events: deque[tuple[Event, int]] = deque()
        self._num_unread = 0
        self._arrived = asyncio.Event()
        self._is_left = False
        self.has_ended = False

    def push(self, event: Event) -> bool:
        """Hold an event; whether the reader keeps up. If it does not, the stream has ended with an error."""
        if self.has_ended:
            return True
        if isinstance(event, Failed):
            self._end_with(event)
            return True
        if isinstance(event, Delta) and event.piece.finish_reason is not None:
            self._num_open -= 1
            self.has_ended = self._num_open == 0
        num_bytes = size_of(event)
        if self._num_unread + num_bytes > MAX_UNREAD_BYTES and not self.has_ended:
            self.fail(
                SlowReaderError(
                    f"{self._num_unread} bytes of the answer were not read, at most {MAX_UNREAD_BYTES} wait: "
                    "the request was cancelled; read faster, or ask for shorter answers"
                )
            )
            return False
        self._events.append((event, num_bytes))
        self._num_unread += num_bytes
        self._arrived.set()
        return True

    def fail(self, error: ColdstreamError) -> None:
        """End with an error, behind what has come; nothing if the stream has ended."""
        if not self.has_ended:
            self._end_with(Failed(self.request_id, error))

    def _end_with(self, failed: Failed) -> None:
        self.has_ended = True
        self._events.append((failed, 0))
        self._arrived.set()

    def watch(self, arrived: asyncio.Event) -> None:
        """Set `arrived` when there is something to take, and at the end."""
        self._arrived = arrived
        if self._events or self.has_ended:
            arrived.set()

    def take(self) -> Event | None:
        """The next event; None if there is none now."""
        if not self._events:
            return None
        event, num_bytes = self._events.popleft()
        self._num_unread -= num_bytes
        return event

    @property
    def is_over(self) -> bool:
        """Whether nothing will ever be there to take."""
        return not self._events and (self.has_ended or self._is_left)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while (event := self.take()) is None:
            if self.is_over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return event

    async def batch(self) -> list[Event]:
        """All events that have come, after waiting for one; none after the last."""
        try:
            events = [await anext(self)]
        except StopAsyncIteration:
            return []
        while self._events:
            events.append(await anext(self))
        return events

    async def aclose(self) -> None:
        """Read no more. A request that has not ended is cancelled."""
        self._events.clear()
        self._num_unread = 0
        if not self._is_left:
            self._is_left = True
            self._arrived.set()
            if not self.has_ended:
                self._leave(self)


def size_of(event: Event) -> int:
    """About the bytes that an event takes until it is read."""
    if not isinstance(event, Delta):
        return _EVENT_BYTES
    num_logprobs = sum(map(len, event.piece.logprobs or ()))
    return _EVENT_BYTES + len(event.piece.text) + _LOGPROB_BYTES * num_logprobs
