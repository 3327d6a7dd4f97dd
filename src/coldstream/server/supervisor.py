"""Supervisor: keeps one engine process running, and is the `EngineClient` of it.

Each process has its own table of streams. When it ends, each stream ends with one error. Nothing of an older
process reaches a later one's requests. Requests are taken only between `Ready` and the end of a process.

An engine that nobody asks for long enough is unloaded, if that is wanted: its process ends, which gives back
all that it had. The next request waits for a new one, whose first failure is that request's error and no
reason to start another by itself.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.engine.events import Delta, Event, Failed, PromptProgress, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.submission import Submission
from coldstream.errors import (
    ColdstreamError,
    GenerationFault,
    InvalidRequestError,
    ModelChangedError,
    OutOfMemoryError,
    QueueFullError,
    out_of_resources,
)
from coldstream.planning.config import EngineConfig
from coldstream.server.client import Health, ServiceUnavailable, State
from coldstream.server.codec import ProtocolError
from coldstream.server.engine_child import END_S, ENGINE_COMMAND, EngineChild, cause_of_death
from coldstream.server.event_stream import EventStream
from coldstream.server.hang_watch import Work, until_hung, work_of
from coldstream.server.idle_rates import IdleRates, RatesSettings
from coldstream.server.idle_unload import REAL_CLOCK, Clock, WakeQueue, until_idle
from coldstream.server.messages import (
    Accepted,
    Alive,
    Cancel,
    Count,
    Counted,
    Died,
    FromEngine,
    Loading,
    Open,
    PromptCache,
    Ready,
    Refused,
    Texts,
)
from coldstream.server.restarts import RestartPolicy, Restarts
from coldstream.server.served_model import EngineFacts, ServedModel

FIRST_LOAD_S: Final = 5.0  # what `Retry-After` says while nothing is known about loading
NO_CACHE: Final = PromptCache()
USUAL_RATES: Final = RatesSettings()
COUNT_S: Final = 1.0  # for the engine to report its statistics between two steps
UNLOAD_S: Final = 10.0  # for an engine that is unloaded to give back what it has, until it is ended

OnProgress = Callable[[str, int, int], None]
OnState = Callable[[Health], None]


@dataclass
class _Running:
    """One process and what is under way in it."""

    child: EngineChild
    counted_before: EngineStatistics | None = None  # by the engines before it
    streams: dict[int, EventStream] = field(default_factory=dict)
    taken: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # submissions not answered yet
    counts: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # once they are in `last_counts`
    last_progress: float = field(default_factory=time.monotonic)
    last_counts: LiveState | None = None  # with those of the engines before it
    hang: GenerationFault | None = None  # why the process was ended
    is_ready: bool = False
    is_unloaded: bool = False  # it ends, as nobody asked for long enough

    def work(self) -> Work | None:
        """What the process has done. Unknown while it loads, which may wait for a network."""
        return work_of(self.child.pid) if self.is_ready else None


class Supervisor:
    """An engine process that is started again when it dies. An async context manager for one event loop.

    idle_unload_s: without a request until the engine is unloaded; None: never. clock: by which that is.
    on_progress: called with the progress of loading. on_state: called with each change of state, for logs.
    rates: how the machine is measured again while nobody asks.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        *,
        name: str,
        cache: PromptCache = NO_CACHE,
        policy: RestartPolicy | None = None,
        idle_unload_s: float | None = None,
        clock: Clock = REAL_CLOCK,
        command: Sequence[str] = ENGINE_COMMAND,
        on_progress: OnProgress | None = None,
        on_state: OnState | None = None,
        rates: RatesSettings = USUAL_RATES,
    ) -> None:
        self._config = config
        self._limits = limits
        self._cache = cache
        self._name = name
        self._command = command
        self._policy = policy or RestartPolicy()
        self._restarts = Restarts(self._policy)
        self._idle_unload_s = idle_unload_s
        self._clock = clock
        self._used_at = clock.now()  # when the last request ended
        self._wake_queue = WakeQueue(limits)
        self._unloads = 0
        self._counted: EngineStatistics | None = None  # by all engines that have ended, as far as was asked
        self._on_progress = on_progress
        self._on_state = on_state
        self._on_rates = rates.on_end
        self._rates = IdleRates(rates.begin, rates.look, clock)
        self._measuring: asyncio.Task[None] | None = None
        self._state: State = "loading"
        self._loading = Loading("", 0, 0)
        self._reason = ""
        self._back_at = time.monotonic() + FIRST_LOAD_S
        self._load_s = FIRST_LOAD_S
        self._created = int(time.time())
        self._model: ServedModel | None = None
        self._running: _Running | None = None
        self._is_ready = False
        self._changed: ModelChangedError | None = None  # why no process is started any more
        self._num_tickets = 0
        self._task: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[ServedModel] | None = None

    async def __aenter__(self) -> Self:
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise(), name="engine")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def model(self) -> ServedModel:
        """The model. Raises ServiceUnavailable before it was ready for the first time."""
        if self._model is None:
            raise self._unavailable()
        return self._model

    @property
    def is_sleeping(self) -> bool:
        """Whether the model is unloaded until the next request."""
        return self._state == "sleeping"

    @property
    def pid(self) -> int | None:
        """The running process's id."""
        return self._running.child.pid if self._running else None

    async def opened(self) -> ServedModel:
        """The model, when it is ready for the first time. Raises what opening it raised."""
        assert self._opened is not None
        return await asyncio.shield(self._opened)

    async def submit(self, submission: Submission) -> EventStream:
        """Begin a request, see `EngineClient`; the reader closes the stream in every case."""
        self._rates.give_up()
        while self._is_away():
            await self._wake_queue.wait(submission)
        running = self._ready()
        request_id = submission.request_id
        if len(running.streams) >= self._limits.max_waiting + self._limits.max_running:
            raise QueueFullError(
                f"{len(running.streams)} requests are under way, which is the limit: try again later"
            )
        if request_id in running.streams:
            raise InvalidRequestError(f"request {request_id}: this id is in use")
        stream = EventStream(request_id, submission.request.params.n, self._left)
        taken = asyncio.get_running_loop().create_future()
        try:
            running.child.send(submission)
        except ProtocolError as error:
            raise InvalidRequestError(f"request {request_id}: {error}") from error
        if not running.streams:
            running.last_progress = time.monotonic()
        running.streams[request_id], running.taken[request_id] = stream, taken
        try:
            await taken
        except ColdstreamError:
            self._forget(running, request_id)
            raise
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        finally:
            running.taken.pop(request_id, None)
        return stream

    async def cancel(self, request_id: int) -> None:
        """End the answers of a request as cancelled; unknown ids are ignored."""
        if self._running is not None and request_id in self._running.streams:
            self._running.child.send(Cancel(request_id))

    async def health(self) -> Health:
        """The engine's state, at once."""
        running, now = self._running, time.monotonic()
        loading = self._loading if self._state in _LOADING else Loading("", 0, 0)
        return Health(
            state=self._state,
            last_progress_age_s=self._silence_s(running) if running is not None else 0.0,
            retry_after_s=max(1.0, self._back_at - now) if self._state in _BACK_LATER else 0.0,
            what=loading.what,
            done=loading.done,
            total=loading.total,
            reason=self._reason,
            restarts=self._restarts.total,
            unloads=self._unloads,
        )

    async def statistics(self) -> EngineStatistics:
        """See `EngineClient.statistics`, and `live`."""
        return (await self.live()).statistics

    async def live(self) -> LiveState:
        """The running engine's state; in a step that takes long the one that it reported last. Counts go on
        where an engine before it had them.

        Raises ServiceUnavailable if none runs, or it has reported none.
        """
        running = self._running if self._is_ready else None
        if running is None:
            raise self._unavailable()
        self._num_tickets += 1
        ticket = self._num_tickets
        running.counts[ticket] = asyncio.get_running_loop().create_future()
        try:
            running.child.send(Count(ticket))
            async with asyncio.timeout(COUNT_S):
                await running.counts[ticket]
        except TimeoutError:
            if running.last_counts is None:
                raise ServiceUnavailable("the engine is in a step that takes long: try again later") from None
        finally:
            running.counts.pop(ticket, None)
        assert running.last_counts is not None
        return running.last_counts

    async def drain(self, grace_s: float) -> None:
        """Take no more requests and wait for those under way; after `grace_s` they end with an error.

        Those that wait for a model that sleeps end at once.
        """
        self._set_state("stopping", "the server stops")
        self._wake_queue.fail(self._unavailable())
        deadline = time.monotonic() + grace_s
        while self._running is not None and self._running.streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.abort()

    def abort(self) -> None:
        """Take no more requests, and end those under way with an error now."""
        self._set_state("stopping", "the server stops")
        self._wake_queue.fail(self._unavailable())
        if self._running is not None:
            for request_id in self._running.streams:
                self._running.child.send(Cancel(request_id))
            _fail_all(self._running, self._unavailable())

    async def close(self) -> None:
        """End the process and what is under way. Closing twice is allowed."""
        self.abort()
        tasks = [each for each in (self._task, self._measuring) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = self._measuring = None
        if self._running is not None:
            await self._running.child.end(0.0)
            self._running = None
        if self._opened is not None and not self._opened.done():
            self._opened.cancel()

    def _ready(self) -> _Running:
        """The process that requests go to. Raises ServiceUnavailable, ModelChangedError."""
        if self._changed is not None:
            raise self._changed
        if self._state != "ready" or self._running is None:
            raise self._unavailable()
        return self._running

    def _unavailable(self) -> ServiceUnavailable:
        what = {
            "loading": "the model is being loaded",
            "ready": "the engine has just ended",
            "sleeping": "the model is unloaded until the next request",
            "waking": "the model is being loaded again",
            "restarting": f"the engine ended ({self._reason}) and is being started again",
            "failed": f"the engine cannot be kept running ({self._reason})",
            "stopping": "the server stops",
        }[self._state]
        return ServiceUnavailable(f"{what}: try again later", max(1.0, self._back_at - time.monotonic()))

    def _is_away(self) -> bool:
        """Whether requests wait for an engine that sleeps, is about to, or is being loaded again."""
        if self._state == "ready" and self._running is not None:
            return self._running.is_unloaded
        return self._state in ("sleeping", "waking")

    def _silence_s(self, running: _Running) -> float:
        """Seconds since its last sign of life while requests wait for it; 0 if none waits."""
        waits = running.streams or (self._state == "waking" and len(self._wake_queue))
        return time.monotonic() - running.last_progress if waits else 0.0

    def _set_state(self, state: State, reason: str = "") -> None:
        if self._state == "stopping":
            return
        self._state, self._reason = state, self._without_folder(reason)
        if state not in _AT_REST:
            self._rates.give_up()
        if self._on_state is not None:
            is_down = state in ("restarting", "failed")
            after = max(0.0, self._back_at - time.monotonic()) if is_down else 0.0
            self._on_state(
                Health(
                    state,
                    reason=reason,
                    retry_after_s=after,
                    restarts=self._restarts.total,
                    unloads=self._unloads,
                )
            )

    def _without_folder(self, text: str) -> str:
        """A reason as clients may read it, who need not know where the model's file is."""
        paths = [Path(self._config.model), *([Path(self._model.facts.path)] if self._model else [])]
        for folder in {str(each.absolute().parent) for path in paths for each in (path, path.resolve())}:
            text = text.replace(f"{folder}{os.sep}", "")
        return text

    async def _supervise(self) -> None:
        while self._state != "stopping":
            try:
                error = await self._run_once()
            except Exception as unexpected:  # or nobody would start the next one
                cause = out_of_resources(unexpected)
                error = cause or GenerationFault(f"unexpected {type(unexpected).__name__}: {unexpected}")
            if self._model is None:
                assert self._opened is not None
                assert error is not None, "only a model that was ready is unloaded"
                self._set_state("failed", str(error))
                self._opened.set_exception(error)
                return
            if error is None or self._state == "waking":
                await self._sleep(error)
                continue
            restart = self._restarts.died()
            if self._changed is not None:
                self._back_at = 0.0
                self._set_state(
                    "failed", f"{error}. Start the server again; --restart-on-change does so itself"
                )
                self._end_streams()
                return
            self._back_at = time.monotonic() + restart.delay_s + self._load_s
            self._set_state("failed" if restart.is_broken else "restarting", str(error))
            self._end_streams()
            await asyncio.sleep(restart.delay_s)

    async def _sleep(self, error: ColdstreamError | None) -> None:
        """Return when a request wants the engine that is unloaded now, or could not be loaded for `error`."""
        self._running = None
        if error is None:
            self._unloads += 1
        else:
            self._wake_queue.fail(self._wake_error(error))
        self._set_state("sleeping", "" if error is None else str(error))
        await self._wake_queue.wanted()
        self._set_state("waking")

    def _wake_error(self, error: ColdstreamError) -> ColdstreamError:
        """What requests get that wanted an engine which could not be loaded."""
        if isinstance(error, OutOfMemoryError):
            return error
        reason = self._without_folder(str(error))
        return ServiceUnavailable(f"the model could not be loaded again ({reason}): try again later")

    async def _run_once(self) -> ColdstreamError | None:
        """Start a process and serve it to its end; why it ended, None if it was unloaded."""
        started = time.monotonic()
        self._loading = Loading("starting", 0, 0)
        try:
            child = await EngineChild.start(self._command)
        except ColdstreamError as error:
            return error
        self._running = running = _Running(child, counted_before=self._counted)
        watches = [asyncio.create_task(self._end_if_hung(running))]
        last: ColdstreamError | None = None
        grace_s = 0.0  # a process that was never ready, or sends no messages, gets no time
        try:
            child.send(Open(self._config_to_open(), self._limits, self._cache))
            async for message in child.messages():
                match message:
                    case Died(error=last):
                        is_final = running.is_ready and not self._policy.on_change
                        if is_final and isinstance(last, ModelChangedError):
                            self._changed = last
                    case Ready(facts=facts):
                        await self._take_model(facts)
                        self._load_s = time.monotonic() - started
                        self._is_ready = running.is_ready = True
                        self._used_at = self._clock.now()
                        if self._idle_unload_s is not None:
                            watches.append(asyncio.create_task(self._unload_if_idle(running)))
                        if facts.rates_are_due and (self._measuring is None or self._measuring.done()):
                            self._measuring = asyncio.create_task(self._measure_if_idle(), name="rates")
                        self._set_state("ready")
                        self._wake_queue.wake()
                    case _:
                        self._take(message, running)
            grace_s = 1.0
        except asyncio.CancelledError:
            await child.end(END_S if self._is_ready else 0.0)
            raise
        except ColdstreamError as error:
            last = error
        finally:
            self._is_ready = False
            for watch in watches:
                watch.cancel()
            if running.last_counts is not None:
                self._counted = running.last_counts.statistics
        code = await child.end(UNLOAD_S if running.is_unloaded else grace_s)
        if running.is_unloaded and self._changed is None:
            return None
        return running.hang or cause_of_death(code, last)

    def _config_to_open(self) -> EngineConfig:
        """The settings. The context of a model that clients know stays, where it was chosen and not given:
        requests that wait were read for it.
        """
        if self._state != "waking" or self._config.plan is not None:
            return self._config
        return replace(self._config, ctx_size=self.model.ctx_size)

    async def _end_if_hung(self, running: _Running) -> None:
        how = await until_hung(lambda: self._silence_s(running), running.work, self._policy)
        running.hang = GenerationFault(how)
        running.child.kill()

    async def _unload_if_idle(self, running: _Running) -> None:
        await until_idle(lambda: self._idle_left_s(running), self._clock)
        running.is_unloaded, self._is_ready = True, False
        running.child.leave()

    async def _measure_if_idle(self) -> None:
        outcome = await self._rates.run(self.model.facts.device, self._idle_s)
        if self._on_rates is not None:
            self._on_rates(outcome)

    def _idle_s(self) -> float:
        """Seconds since the last request; 0 while there is one, or an engine is loaded."""
        running = self._running
        if self._state not in _AT_REST or len(self._wake_queue) or (running is not None and running.streams):
            return 0.0
        return self._clock.now() - self._used_at

    def _idle_left_s(self, running: _Running) -> float:
        """Seconds until the engine has been idle for long enough."""
        assert self._idle_unload_s is not None
        if running.streams or len(self._wake_queue):
            return self._idle_unload_s
        return self._used_at + self._idle_unload_s - self._clock.now()

    def _end_streams(self) -> None:
        """The process is gone: all that waits for it ends with the error that says so."""
        running, self._running = self._running, None
        if running is not None:
            _fail_all(running, self._unavailable())

    async def _take_model(self, facts: EngineFacts) -> None:
        if self._model is None:
            self._model = await asyncio.to_thread(ServedModel.read, self._name, self._created, facts)
        elif self._model.facts != facts:
            self._model = await asyncio.to_thread(self._model.opened_anew, facts)
        assert self._opened is not None
        if not self._opened.done():
            self._opened.set_result(self._model)

    def _take(self, message: FromEngine, running: _Running) -> None:
        running.last_progress = time.monotonic()
        match message:
            case Texts():
                for delta in message.deltas():
                    self._pass_on(delta, running)
            case Loading():
                self._loading = message
                if self._on_progress is not None:
                    self._on_progress(message.what, message.done, message.total)
            case Accepted(request_id=request_id):
                if (taken := running.taken.get(request_id)) is not None and not taken.done():
                    taken.set_result(None)
            case Refused(request_id=request_id, error=error):
                if (taken := running.taken.get(request_id)) is not None and not taken.done():
                    taken.set_exception(error)
            case Counted(ticket=ticket, live=live):
                statistics = live.statistics.going_on(running.counted_before)
                running.last_counts = replace(live, statistics=statistics)
                if (counted := running.counts.get(ticket)) is not None and not counted.done():
                    counted.set_result(None)
            case Started() | PromptProgress() | Delta() | Failed():
                self._pass_on(message, running)
            case Alive():
                pass
            case _:
                raise ProtocolError(f"a {type(message).__name__} out of turn")

    def _pass_on(self, event: Event, running: _Running) -> None:
        stream = running.streams.get(event.request_id)
        if stream is None:  # its reader has left
            return
        if not stream.push(event):
            running.child.send(Cancel(event.request_id))
        if stream.has_ended:
            self._forget(running, event.request_id)
        if isinstance(event, Delta):
            self._restarts.moved()

    def _left(self, stream: EventStream) -> None:
        """The reader of a stream has closed it before its end."""
        running = self._running
        if running is not None and running.streams.get(stream.request_id) is stream:
            self._forget(running, stream.request_id)
            running.child.send(Cancel(stream.request_id))

    def _forget(self, running: _Running, request_id: int) -> None:
        """The request has ended, or its reader has left."""
        running.streams.pop(request_id, None)
        self._used_at = self._clock.now()


_AT_REST: Final = ("ready", "sleeping")  # states in which nobody waits, where no request runs
_LOADING: Final = ("loading", "restarting", "waking")
_BACK_LATER: Final = ("loading", "restarting", "failed")  # states in which requests are refused for a while


def _fail_all(running: _Running, error: ServiceUnavailable) -> None:
    for taken in running.taken.values():
        if not taken.done():
            taken.set_exception(error)
    for counted in running.counts.values():
        if not counted.done():
            counted.set_exception(error)
    for stream in running.streams.values():
        stream.fail(error)
    running.streams.clear()
