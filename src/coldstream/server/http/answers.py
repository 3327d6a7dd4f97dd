"""The events of what one HTTP request asks of the engine, and their end when the request ends.

Unit of work: one HTTP request, with one submission for each of its prompts. Knows no API's shapes.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final, Self, cast

import anyio

from coldstream.engine.events import Delta, Event, Failed
from coldstream.engine.generation import Request
from coldstream.engine.submission import Submission
from coldstream.server.client import EngineClient, ServiceUnavailable
from coldstream.server.http.metrics import Metrics
from coldstream.server.http.settings import ServerSettings

MAX_BORDERS: Final = 5
_QUEUED_EVENTS: Final = 64  # read ahead of the client; beyond it the engine's own bounds count
_STOPPED_RETRY_S: Final = 5.0
_FIRST_EVENT_S: Final = 1.0  # that a stream's status waits for an error that comes at once


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
            borders=borders_of(request.prompt_token_ids, end_ids),
            namespace=namespace,
            deadline=None if timeout is None else time.monotonic() + timeout,
            progress=progress,
        )


def borders_of(token_ids: Sequence[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    """Where later prompts are likely to part from this one: after its first turn, which holds the system
    prompt and the tools, and after its last ones. A turn ends with an end token.
    """
    ends = [position for position, token_id in enumerate(token_ids, start=1) if token_id in end_ids]
    return tuple(ends if len(ends) <= MAX_BORDERS else [ends[0], *ends[1 - MAX_BORDERS :]])


class Answers:
    """The events of several submissions as one sequence. A context manager, or `begin` and `close`."""

    def __init__(self, serving: Serving, submissions: Sequence[Submission]) -> None:
        self._serving = serving
        self._submissions = submissions
        self._queue: asyncio.Queue[tuple[int, Event | BaseException | None]] = asyncio.Queue(_QUEUED_EVENTS)
        self._pumps: list[asyncio.Task[None]] = []
        self._peeked: list[tuple[int, Event]] = []
        self._num_ended = 0
        self._began = time.monotonic()
        self._last_at: dict[tuple[int, int], float] = {}
        self._outcome = "cancelled"

    async def begin(self) -> None:
        """Give all submissions to the engine. Raises its refusal; nothing of them goes on then."""
        try:
            for index, submission in enumerate(self._submissions):
                events = await self._serving.client.submit(submission)
                self._pumps.append(asyncio.create_task(self._pump(index, events)))
        except BaseException as error:
            self._outcome = "error" if isinstance(error, Exception) else "cancelled"
            await self.close()
            raise

    async def begin_stream(self) -> None:
        """`begin`, and wait a moment for the first event, so that an error that comes at once is a status and
        no event of a stream. Raises that error.
        """
        await self.begin()
        try:
            with anyio.move_on_after(_FIRST_EVENT_S):
                first = await self._next()
                self._peeked = [] if first is None else [first]
        except BaseException:
            await self.close()
            raise

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def events(self, keep_alive_s: float) -> AsyncGenerator[tuple[int, Event] | None, None]:
        """(prompt, event) until all answers have ended; None whenever there was nothing for `keep_alive_s`.

        Raises the error of a request that fails.
        """
        while self._peeked:
            yield self._peeked.pop(0)
        while True:
            with anyio.move_on_after(keep_alive_s) as patience:
                event = await self._next()
            if patience.cancelled_caught:
                yield None
            elif event is None:
                break
            else:
                yield event
        self._outcome = "ok"

    async def close(self) -> None:
        """End what still runs, and count the request."""
        for pump in self._pumps:
            pump.cancel()
        if self._outcome != "ok":
            for submission in self._submissions:
                with suppress(ServiceUnavailable):  # then nothing of it runs
                    await self._serving.client.cancel(submission.request_id)
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self._serving.metrics.count_request(self._outcome)

    async def _next(self) -> tuple[int, Event] | None:
        """The next event, None after the last one of the last submission. Raises a request's error."""
        while self._num_ended < len(self._submissions):
            index, item = await self._queue.get()
            if item is None:
                self._num_ended += 1
            elif isinstance(item, BaseException | Failed):
                self._outcome = "error"
                raise item.error if isinstance(item, Failed) else item
            elif isinstance(item, Delta) and item.piece.finish_reason == "cancelled":
                self._outcome = "error"
                raise ServiceUnavailable("the server stops: send the request again", _STOPPED_RETRY_S)
            else:
                self._observe(index, item)
                return index, item
        return None

    async def _pump(self, index: int, events: AsyncIterator[Event]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(cast(AsyncGenerator[Event, None], events)):
                async for event in events:
                    await self._queue.put((index, event))
        except Exception as error:
            end = error
        await self._queue.put((index, end))

    def _observe(self, index: int, event: Event) -> None:
        if not isinstance(event, Delta) or not event.piece.token_ids:
            return
        now, key = time.monotonic(), (index, event.index)
        if key in self._last_at:
            self._serving.metrics.observe_gap(now - self._last_at[key])
        else:
            self._serving.metrics.observe_first(now - self._began)
        self._last_at[key] = now
