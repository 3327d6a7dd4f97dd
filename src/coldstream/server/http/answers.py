"""The events of what one HTTP request asks of the engine, and their end when the request ends.

Unit of work: one HTTP request, with one submission for each of its prompts. Knows no API's shapes.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import anyio

from coldstream.engine.answer import Request
from coldstream.engine.events import Delta, Event, Failed
from coldstream.engine.submission import Submission
from coldstream.server.client import EngineClient, ServiceUnavailable
from coldstream.server.event_stream import EventStream
from coldstream.server.http.metrics import Metrics
from coldstream.server.http.settings import ServerSettings

MAX_BOUNDARIES: Final = 5
_STOPPED_RETRY_S: Final = 5.0
_FIRST_EVENT_S: Final = 1.0  # seconds that the status of a stream waits for an early error


@dataclass(frozen=True)
class Serving:
    """What routes share: the engine, the settings, counts, and the numbers of submissions."""

    client: EngineClient
    settings: ServerSettings
    metrics: Metrics
    # From a random start, as other applications may ask the same engine.
    request_ids: Iterator[int] = field(default_factory=lambda: itertools.count(secrets.randbits(40) << 20))

    def submission(
        self, request: Request, end_ids: frozenset[int], namespace: str, *, progress: bool = False
    ) -> Submission:
        """A request for the engine, due `request_timeout_s` from now."""
        timeout = self.settings.request_timeout_s
        return Submission(
            request_id=next(self.request_ids),
            request=request,
            boundaries=boundaries_of(request.prompt_token_ids, end_ids),
            namespace=namespace,
            deadline=None if timeout is None else time.monotonic() + timeout,
            progress=progress,
        )


def boundaries_of(token_ids: Sequence[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    """Where later prompts are likely to part from this one: after its first turn, which holds the system
    prompt and the tools, and after its last ones. A turn ends with an end token.
    """
    ends = [position for position, token_id in enumerate(token_ids, start=1) if token_id in end_ids]
    return tuple(ends if len(ends) <= MAX_BOUNDARIES else [ends[0], *ends[1 - MAX_BOUNDARIES :]])


class Answers:
    """The events of several submissions as one sequence. A context manager, or `begin` and `close`."""

    def __init__(self, serving: Serving, submissions: Sequence[Submission]) -> None:
        self._serving = serving
        self._submissions = submissions
        self._arrived = asyncio.Event()  # set when an event of any stream arrives
        self._streams: dict[int, EventStream] = {}  # by submission: streams that may have more events
        self._peeked: tuple[int, Event] | None = None
        self._beginning: asyncio.Task[None] | None = None  # of a stream, until all submissions have begun
        self._began = time.monotonic()
        self._last_at: dict[tuple[int, int], float] = {}
        self._outcome = "cancelled"
        self._is_ended = False  # whether the answers were ended because they are complete

    async def begin(self) -> None:
        """Give all submissions to the engine. Raises its refusal; nothing of them goes on then."""
        try:
            await self._submit()
        except BaseException as error:
            self._outcome = "error" if isinstance(error, Exception) else "cancelled"
            await self.close()
            raise

    async def begin_stream(self) -> None:
        """Begin, and wait a moment for the first event, so that an error that comes at once is a status and
        no event of a stream. Raises that error.

        A model that sleeps may take minutes to be loaded. The stream begins meanwhile, and `events` goes on.
        """
        self._beginning = asyncio.create_task(self._submit())
        self._beginning.add_done_callback(lambda _: self._arrived.set())
        try:
            with anyio.move_on_after(_FIRST_EVENT_S):
                await asyncio.shield(self._beginning)
                self._peeked = await self._first()
        except BaseException as error:
            self._outcome = "error" if isinstance(error, Exception) else "cancelled"
            await self.close()
            raise

    async def _submit(self) -> None:
        for index, submission in enumerate(self._submissions):
            self._streams[index] = await self._serving.client.submit(submission)
            self._streams[index].watch(self._arrived)

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def events(
        self, keep_alive_s: float, is_complete: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[tuple[int, Event] | None, None]:
        """(prompt, event) until all answers have ended; None whenever there was nothing for `keep_alive_s`.

        is_complete: asked after each event; once the answers are complete the engine ends them, as if they
        had ended by themselves. Raises the error of a request that fails.
        """
        if self._peeked is not None:
            yield self._peeked
        silence = _Silence(keep_alive_s, self._arrived.set)
        try:
            while self._begins() or self._streams:
                if (item := self._take()) is not None or silence.is_over:
                    silence.begin()
                    yield item
                    if not self._is_ended and is_complete():
                        await self._end()
                elif self._begins() or self._streams:
                    await self._arrival()
        finally:
            silence.close()
        self._outcome = "ok"

    def _begins(self) -> bool:
        """Whether a submission is still to begin. Raises its refusal, once."""
        if self._beginning is None or not self._beginning.done():
            return self._beginning is not None
        beginning, self._beginning = self._beginning, None
        try:
            beginning.result()
        except Exception:
            self._outcome = "error"
            raise
        return bool(self._streams)

    async def _end(self) -> None:
        self._is_ended = True
        for stream in self._streams.values():
            await self._serving.client.cancel(stream.request_id)

    async def close(self) -> None:
        """End what still runs, and count the request."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
            self._beginning = None
        for stream in self._streams.values():
            await stream.aclose()
        self._serving.metrics.count_request(self._outcome)

    async def _first(self) -> tuple[int, Event] | None:
        while self._streams:
            if (item := self._take()) is not None:
                return item
            await self._arrival()
        return None

    async def _arrival(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    def _take(self) -> tuple[int, Event] | None:
        """The next event that has come. Raises a request's error. Drops streams that are over."""
        for index, stream in tuple(self._streams.items()):
            event = stream.take()
            if stream.is_over:
                del self._streams[index]
            if event is not None:
                event = self._completed(event) if self._is_ended else event
                self._check(event)
                self._observe(index, event)
                return index, event
        return None

    @staticmethod
    def _completed(event: Event) -> Event:
        """The event of an answer that was ended because it is complete."""
        if isinstance(event, Delta) and event.piece.finish_reason == "cancelled":
            return replace(event, piece=replace(event.piece, finish_reason="stop"))
        return event

    def _check(self, event: Event) -> None:
        if isinstance(event, Failed):
            self._outcome = "error"
            raise event.error
        if isinstance(event, Delta) and event.piece.finish_reason == "cancelled":
            self._outcome = "error"
            raise ServiceUnavailable("the server stops: send the request again", _STOPPED_RETRY_S)

    def _observe(self, index: int, event: Event) -> None:
        if not isinstance(event, Delta) or not event.piece.token_ids:
            return
        now, key = time.monotonic(), (index, event.index)
        if key in self._last_at:
            self._serving.metrics.observe_gap(now - self._last_at[key])
        else:
            self._serving.metrics.observe_first(now - self._began)
        self._last_at[key] = now


class _Silence:
    """Tells by `wake` that a time has passed since the last `begin`, and again after as long. With one timer
    for all events, since there is one for each token of each answer.
    """

    def __init__(self, seconds: float, wake: Callable[[], None]) -> None:
        self._loop, self._seconds, self._wake = asyncio.get_running_loop(), seconds, wake
        self._end = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._end, self._ring)

    def begin(self) -> None:
        """What was not silent is from now on."""
        self._end = self._loop.time() + self._seconds

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return self._loop.time() >= self._end

    def close(self) -> None:
        """Tell nothing any more."""
        self._timer.cancel()

    def _ring(self) -> None:
        at = self._end
        if self.is_over:
            self._wake()
            at = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(at, self._ring)
