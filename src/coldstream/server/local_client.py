"""LocalClient: an engine in this process, behind the interface that HTTP knows.

One thread computes, and does between steps what the event loop asks of it; events go back to the loop. For
programs that serve a model they have opened themselves: an engine that fails takes its program with it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from coldstream.closing import Closing
from coldstream.engine.engine import Engine
from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.engine.events import Event
from coldstream.engine.limits import EngineLimits
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.submission import Submission
from coldstream.errors import InvalidRequestError
from coldstream.kvcache import PrefixTier
from coldstream.server.client import Health, ServiceUnavailable
from coldstream.server.event_stream import EventStream
from coldstream.server.served_model import ServedModel

T = TypeVar("T")


class LocalClient(Closing):
    """An `EngineClient` over an open model, which stays the caller's; close the client first."""

    def __init__(
        self,
        opened: OpenedModel,
        name: str,
        limits: EngineLimits | None = None,
        tiers: Collection[PrefixTier] = (),
    ) -> None:
        """name: of the model, as clients ask for it. tiers: see `Engine`."""
        self._model = ServedModel.of_opened(name, int(time.time()), opened)
        engine = Engine(opened, limits or EngineLimits(), tiers=tiers)
        self._statistics = engine.statistics()
        self._moved_at = time.monotonic()
        self._fault: str | None = None
        self._streams: dict[int, EventStream] = {}  # streams without their last event; used by the loop alone
        self._condition = threading.Condition()
        self._work: deque[Callable[[Engine], None]] = deque()
        self._is_closing = self._has_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop of the last request
        self._thread = threading.Thread(target=self._run, args=(engine,), name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all requests after the step that runs, and the thread. Closing twice is allowed."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()

    @property
    def model(self) -> ServedModel:
        """The model."""
        return self._model

    @property
    def is_sleeping(self) -> bool:
        """Never: the model is the caller's, who closes it."""
        return False

    async def submit(self, submission: Submission) -> EventStream:
        """See `EngineClient.submit`."""
        request_id = submission.request_id
        if request_id in self._streams:
            raise InvalidRequestError(f"request {request_id} is being served: give each a new id")
        stream = EventStream(request_id, submission.request.params.n, self._leave)
        self._streams[request_id] = stream
        try:
            await self._call(lambda engine: engine.add(submission))
        except BaseException:
            self._leave(stream)
            self._check_running()
            raise
        return stream

    async def cancel(self, request_id: int) -> None:
        """See `EngineClient.cancel`."""
        self._post(lambda engine: engine.cancel(request_id))

    async def health(self) -> Health:
        """See `EngineClient.health`."""
        if self._fault is not None or self._is_closing:
            return Health("failed" if self._fault else "stopping", reason=self._fault or "")
        age = time.monotonic() - self._moved_at if self._streams else 0.0
        return Health("ready", last_progress_age_s=age)

    async def statistics(self) -> EngineStatistics:
        """See `EngineClient.statistics`; as of the last step."""
        self._check_running()
        return self._statistics

    async def live(self) -> LiveState:
        """See `EngineClient.live`."""
        return await self._call(Engine.live)

    def _leave(self, stream: EventStream) -> None:
        self._streams.pop(stream.request_id, None)
        self._post(lambda engine: engine.cancel(stream.request_id))

    async def _call(self, work: Callable[[Engine], T]) -> T:
        """The result of `work`, which the engine's thread does between steps. Raises its error."""
        self._check_running()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def do(engine: Engine) -> None:
            try:
                settle = partial(future.set_result, work(engine))
            except Exception as error:
                settle = partial(future.set_exception, error)
            loop.call_soon_threadsafe(_settle, future, settle)

        self._loop = loop
        if not self._post(do):
            self._check_running()
        return await future

    def _check_running(self) -> None:
        if self._fault is not None or self._is_closing:
            raise ServiceUnavailable(f"the engine has ended: {self._fault or 'it was closed'}")

    def _post(self, work: Callable[[Engine], None]) -> bool:
        """Whether the engine's thread will do `work`; it does none after its end."""
        with self._condition:
            if not self._has_ended:
                self._work.append(work)
                self._condition.notify()
            return not self._has_ended

    def _run(self, engine: Engine) -> None:
        """The engine's thread, to which it belongs."""
        fault: Exception | None = None
        while fault is None:
            with self._condition:
                self._condition.wait_for(lambda: self._work or self._is_closing or not engine.is_idle)
                if self._is_closing:
                    break
                work, self._work = self._work, deque()
            try:
                for each in work:
                    each(engine)
                events = [] if engine.is_idle else engine.step()
                self._statistics = engine.statistics()
                self._in_loop(partial(self._deliver, events))
            except Exception as error:  # of the engine itself: requests' own are events
                fault = error
            self._moved_at = time.monotonic()
        self._end(engine, fault)

    def _end(self, engine: Engine, fault: Exception | None) -> None:
        if fault is not None:
            self._fault = f"{type(fault).__name__}: {fault}"
        engine.close()
        with self._condition:
            self._has_ended = True
            work = self._work
        for each in work:
            each(engine)
        self._in_loop(self._fail_all)

    def _in_loop(self, work: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    def _deliver(self, events: list[Event]) -> None:
        """In the loop: events to their readers. What a reader that is too far behind asked for is ended."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if not stream.push(event):
                self._leave(stream)
            elif stream.has_ended:
                del self._streams[event.request_id]

    def _fail_all(self) -> None:
        """In the loop: the last event of all requests."""
        error = ServiceUnavailable(f"the engine has ended: {self._fault or 'it was closed'}")
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()


def _settle(future: asyncio.Future[T], settle: Callable[[], None]) -> None:
    """Nobody waits any more for a future that is done: its waiter was cancelled."""
    if not future.done():
        settle()
