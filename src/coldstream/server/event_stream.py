"""EventStream: the events of one request on their way to its reader, within a bound."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from coldstream.engine.events import Delta, Event, Failed
from coldstream.errors import ColdstreamError
from coldstream.server.client import SlowReaderError

MAX_UNREAD_BYTES: Final = 256 << 10  # of events as they came; the last one is taken beyond it


class EventStream:
    """Events in order, ended by the last one of the last answer or by a failure.

    One reader, who calls `aclose` in every case. Waiting for an event may be cancelled and begun again.
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

    def push(self, event: Event, num_bytes: int) -> bool:
        """Take an event; whether the reader keeps up. If it does not, the stream has ended with an error."""
        if self.has_ended:
            return True
        if isinstance(event, Failed):
            self._end_with(event)
            return True
        if isinstance(event, Delta) and event.piece.finish_reason is not None:
            self._num_open -= 1
            self.has_ended = self._num_open == 0
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

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.has_ended or self._is_left:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event, num_bytes = self._events.popleft()
        self._num_unread -= num_bytes
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
