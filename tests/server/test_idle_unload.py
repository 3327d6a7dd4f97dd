"""An engine that nobody asks is unloaded, and comes back with the next request, whatever that meets."""

import asyncio
import heapq
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import CTX_SIZE, DIE, WAIT

from coldstream.assets import demo_model_path
from coldstream.decoding import SamplingParams
from coldstream.engine import EngineConfig
from coldstream.engine.answer import Request
from coldstream.engine.events import Delta, Failed, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.submission import Submission
from coldstream.errors import DeadlineError, InvalidRequestError, OutOfMemoryError, QueueFullError
from coldstream.server.client import Health, ServiceUnavailable
from coldstream.server.idle_unload import Clock, until_idle
from coldstream.server.restarts import RestartPolicy
from coldstream.server.supervisor import Supervisor

SCRIPT = Path(__file__).with_name("scripted_engine.py")
IDLE_S = 600.0
LIMITS = EngineLimits()
QUICK = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0)


class SetClock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self.clock = Clock(lambda: self.now, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, id(future), future))
        await future

    def advance(self, seconds: float) -> None:
        """Let time pass: those whose time is up go on in the next turn of the loop."""
        self.now += seconds
        while self._sleepers and self._sleepers[0][0] <= self.now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)


class Slept:
    """A supervisor whose engine is unloaded when the clock says so."""

    def __init__(self, supervisor: Supervisor, clock: SetClock, folder: Path, states: list[str]) -> None:
        self.supervisor, self.clock, self.folder, self.states = supervisor, clock, folder, states

    def let_it_load(self) -> None:
        """Those that wait for it by their script."""
        (self.folder / "go").touch()

    async def until(self, *states: str) -> Health:
        while (health := await self.supervisor.health()).state not in states:
            await asyncio.sleep(0)
            await asyncio.to_thread(os.sched_yield)
        return health

    async def to_sleep(self) -> None:
        self.clock.advance(IDLE_S)
        await self.until("sleeping")

    async def answer(self, request_id: int, first: int = 5) -> str:
        stream = await self.supervisor.submit(submission(request_id, first, 6))
        events = [event async for event in stream]
        assert isinstance(events[0], Started)
        return "".join(event.piece.text for event in events if isinstance(event, Delta))

    def ask(self, request_id: int) -> "asyncio.Task[str]":
        return asyncio.create_task(self.answer(request_id))


Start = Callable[..., AbstractAsyncContextManager[Slept]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts an engine with a script, a word for each process, and waits until it is ready."""

    @asynccontextmanager
    async def started(
        *words: str, limits: EngineLimits = LIMITS, idle_s: float | None = IDLE_S, ctx_size: int | None = None
    ) -> AsyncIterator[Slept]:
        script = tmp_path / "script"
        script.write_text("\n".join(words or ("serve",)))
        clock, states = SetClock(), list[str]()
        supervisor = Supervisor(
            EngineConfig(str(demo_model_path()), ctx_size=ctx_size),
            limits,
            name="demo",
            policy=QUICK,
            idle_unload_s=idle_s,
            clock=clock.clock,
            command=(sys.executable, str(SCRIPT), str(script)),
            on_state=lambda health: states.append(health.state),
        )
        async with supervisor:
            await supervisor.opened()
            await asyncio.sleep(0)
            yield Slept(supervisor, clock, tmp_path, states)

    return started


def submission(request_id: int, *ids: int, max_tokens: int = 3, owner: str = "") -> Submission:
    request = Request(None, ids, SamplingParams(), 0, max_tokens, frozenset(), frozenset(), "t", 1)
    return Submission(request_id, request, namespace=owner)


@given(st.sets(st.integers(0, 40)))
def test_the_time_is_over_when_nobody_asked_for_so_long_and_not_before(asked: set[int]) -> None:
    """Requests come at these half seconds and end at once. None comes when the time is just over."""
    clock, used_at, limit_s = SetClock(), 0.0, 5.25
    clock.now = 0.0

    async def over_at() -> float:
        nonlocal used_at
        waiting = asyncio.create_task(until_idle(lambda: used_at + limit_s - clock.now, clock.clock))
        while True:
            for _ in range(3):
                await asyncio.sleep(0)
            if waiting.done():
                return clock.now
            if clock.now * 2 in asked:
                used_at = clock.now
            clock.advance(0.25)

    times = [0.0, *(each / 2 for each in sorted(asked)), 100.0]
    expected = next(before + limit_s for before, after in pairwise(times) if after - before > limit_s)
    assert asyncio.run(over_at()) == expected


async def test_an_engine_that_nobody_asks_is_unloaded_and_the_next_request_loads_it(start: Start) -> None:
    async with start() as slept:
        before = await slept.answer(1)
        assert slept.supervisor.pid is not None
        process = psutil.Process(slept.supervisor.pid)
        slept.clock.advance(IDLE_S - 1)
        await asyncio.sleep(0)
        assert slept.supervisor.pid == process.pid
        await slept.to_sleep()
        assert slept.supervisor.pid is None
        assert not process.is_running()
        assert slept.supervisor.is_sleeping
        assert slept.supervisor.model.name == "demo"
        with pytest.raises(ServiceUnavailable, match="unloaded until the next request"):
            await slept.supervisor.live()
        assert await slept.answer(2) == before
        assert not slept.supervisor.is_sleeping
        health = await slept.supervisor.health()
        assert (health.state, health.restarts, health.unloads) == ("ready", 0, 1)
        assert slept.states == ["ready", "sleeping", "waking", "ready"]


async def test_a_request_that_runs_for_longer_keeps_the_engine_and_the_time_begins_at_its_end(
    start: Start,
) -> None:
    async with start() as slept:
        stream = await slept.supervisor.submit(submission(1, WAIT))
        slept.clock.advance(3 * IDLE_S)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        slept.clock.advance(IDLE_S / 2)
        await stream.aclose()
        slept.clock.advance(IDLE_S / 2)
        await asyncio.sleep(0)
        assert await slept.answer(2) == "5 6 5 "
        assert slept.states == ["ready"]
        await slept.to_sleep()


async def test_questions_about_the_engine_do_not_keep_it_and_do_not_wake_it(start: Start) -> None:
    async with start() as slept:
        for _ in range(2):
            slept.clock.advance(IDLE_S / 2 - 1)
            await slept.supervisor.health()
            await slept.supervisor.live()
        slept.clock.advance(2)
        await slept.until("sleeping")
        await slept.supervisor.health()
        with pytest.raises(ServiceUnavailable):
            await slept.supervisor.live()
        assert slept.states == ["ready", "sleeping"]


async def test_counts_never_go_back_where_the_engine_is_another_one(start: Start) -> None:
    """It is unloaded, woken, dies and is started again, between questions about its counts."""
    async with start() as slept:
        seen: list[tuple[float, ...]] = []

        async def look() -> None:
            counts = (await slept.supervisor.live()).statistics
            assert counts.expert_times is not None
            seen.append((counts.steps, counts.launch_s, counts.expert_times.disk))

        for number in range(3):
            assert await slept.answer(3 * number) == "5 6 5 "
            await look()
            await slept.to_sleep()
            assert await slept.answer(3 * number + 1) == "5 6 5 "
            await look()
            stream = await slept.supervisor.submit(submission(3 * number + 2, DIE))
            assert [event async for event in stream]
            await slept.until("ready")
            await look()
        assert all(now >= before for pair in pairwise(seen) for before, now in zip(*pair, strict=True))
        assert len({each[0] for each in seen}) == 6, "each answer is counted"


async def test_without_a_time_an_engine_is_kept(start: Start) -> None:
    async with start(idle_s=None) as slept:
        pid = slept.supervisor.pid
        slept.clock.advance(1e9)
        assert await slept.answer(1) == "5 6 5 "
        assert slept.supervisor.pid == pid


async def test_a_request_at_the_moment_of_closing_waits_and_is_answered(start: Start) -> None:
    """The engine's process is to leave, and is not gone yet."""
    async with start() as slept:
        assert slept.supervisor.pid is not None
        process = psutil.Process(slept.supervisor.pid)
        process.suspend()
        slept.clock.advance(IDLE_S)
        for _ in range(3):
            await asyncio.sleep(0)
        assert (await slept.supervisor.health()).state == "ready"
        asking = slept.ask(1)
        await asyncio.sleep(0)
        assert not asking.done()
        process.resume()
        assert await asking == "5 6 5 "
        assert not process.is_running()
        assert slept.states == ["ready", "sleeping", "waking", "ready"]


async def test_requests_while_it_sleeps_are_answered_by_one_process(start: Start) -> None:
    async with start("serve", "wait") as slept:
        await slept.to_sleep()
        asking = [slept.ask(request_id) for request_id in range(3)]
        await slept.until("waking")
        asking.append(slept.ask(3))
        health = await slept.supervisor.health()
        assert (health.retry_after_s, health.reason) == (0.0, "")
        slept.let_it_load()
        assert await asyncio.gather(*asking) == ["5 6 5 "] * 4
        assert slept.states == ["ready", "sleeping", "waking", "ready"]


@pytest.mark.sharded(of="processes")
async def test_a_request_that_is_cancelled_while_it_loads_leaves_nothing(start: Start) -> None:
    async with start("serve", "wait") as slept:
        await slept.to_sleep()
        left, kept = slept.ask(1), slept.ask(2)
        await slept.until("waking")
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        slept.let_it_load()
        assert await kept == "5 6 5 "
        assert await slept.answer(1) == "5 6 5 "  # its number is free


async def test_a_request_that_is_cancelled_before_it_loads_wakes_nothing(start: Start) -> None:
    async with start() as slept:
        assert slept.supervisor.pid is not None
        process = psutil.Process(slept.supervisor.pid)
        process.suspend()
        slept.clock.advance(IDLE_S)
        for _ in range(3):
            await asyncio.sleep(0)
        asking = slept.ask(1)
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        process.resume()
        await slept.until("sleeping")
        for _ in range(3):
            await asyncio.sleep(0)
        assert slept.states == ["ready", "sleeping"]


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [
        ("fail", OutOfMemoryError, "needs 9 GiB"),
        ("die", ServiceUnavailable, r"could not be loaded again \(.*signal 9\)"),
    ],
)
async def test_a_failure_to_load_is_each_waiting_requests_error_and_the_next_one_tries_again(
    start: Start, word: str, kind: type[Exception], message: str
) -> None:
    async with start("serve", word, word, "serve") as slept:
        await slept.to_sleep()
        for _ in range(2):
            for asking in [slept.ask(1), slept.ask(2)]:
                with pytest.raises(kind, match=message):
                    await asking
            health = await slept.until("sleeping")
            assert health.reason
            assert (health.restarts, health.retry_after_s) == (0, 0.0)
            assert slept.supervisor.pid is None
        assert await slept.answer(3) == "5 6 5 "
        assert (await slept.supervisor.health()).reason == ""


async def test_an_engine_that_dies_after_it_was_woken_is_restarted_as_ever(start: Start) -> None:
    async with start() as slept:
        await slept.to_sleep()
        stream = await slept.supervisor.submit(submission(1, DIE))
        events = [event async for event in stream]
        assert isinstance(events[-1], Failed)
        await slept.until("ready")
        assert await slept.answer(2) == "5 6 5 "
        assert slept.states == ["ready", "sleeping", "waking", "ready", "restarting", "ready"]
        await slept.to_sleep()
        assert (await slept.supervisor.health()).unloads == 2


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("moment", ["sleeping", "waking"])
async def test_a_server_that_stops_while_it_sleeps_or_loads_leaves_no_process(
    start: Start, moment: str
) -> None:
    async with start("serve", "hang") as slept:
        await slept.to_sleep()
        asking = None
        if moment == "waking":
            asking = slept.ask(1)
            await slept.until("waking")
            while slept.supervisor.pid is None:
                await asyncio.sleep(0)
        pid = slept.supervisor.pid
        await slept.supervisor.drain(60.0)
        if asking is not None:
            with pytest.raises(ServiceUnavailable, match="server stops"):
                await asking
        with pytest.raises(ServiceUnavailable, match="server stops"):
            await slept.supervisor.submit(submission(2, 5))
    assert pid is None or not psutil.pid_exists(pid)


@pytest.mark.sharded(of="processes")
async def test_closing_in_the_middle_of_unloading_leaves_no_process(start: Start) -> None:
    async with start() as slept:
        assert slept.supervisor.pid is not None
        process = psutil.Process(slept.supervisor.pid)
        process.suspend()
        slept.clock.advance(IDLE_S)
        asking = slept.ask(1)
        for _ in range(3):
            await asyncio.sleep(0)
    assert not process.is_running()
    with pytest.raises(ServiceUnavailable, match="server stops"):
        await asking


async def test_the_queue_has_its_limits_while_it_sleeps(start: Start) -> None:
    limits = EngineLimits(max_running=1, max_waiting=2, max_waiting_of_owner=1)
    async with start("serve", "wait", limits=limits) as slept:
        await slept.to_sleep()
        submit = slept.supervisor.submit
        waiting = [asyncio.create_task(submit(submission(i, 5, owner="a"))) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="with this API key"):
            await submit(submission(2, 5, owner="a"))
        waiting.append(asyncio.create_task(submit(submission(3, 5, owner="b"))))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            await submit(submission(4, 5, owner="c"))
        with pytest.raises(InvalidRequestError, match="in use"):
            await submit(submission(3, 5, owner="c"))
        slept.let_it_load()
        for stream in await asyncio.gather(*waiting):
            assert not any([isinstance(event, Failed) async for event in stream])


async def test_a_deadline_holds_while_it_loads(start: Start) -> None:
    async with start("serve", "wait") as slept:
        await slept.to_sleep()
        with pytest.raises(DeadlineError, match="not loaded again by its deadline"):
            await slept.supervisor.submit(replace(submission(1, 5), deadline=0.0))
        slept.let_it_load()
        assert await slept.answer(1) == "5 6 5 "


@pytest.mark.parametrize("ctx_size", [None, 512])
async def test_the_context_that_clients_know_stays(start: Start, ctx_size: int | None) -> None:
    """A chosen one may come out shorter where others have taken memory; what waits was read for the old."""
    async with start("serve", "small", ctx_size=ctx_size) as slept:
        assert slept.supervisor.model.ctx_size == (ctx_size or CTX_SIZE)
        await slept.to_sleep()
        await slept.answer(1)
        assert slept.supervisor.model.ctx_size == (ctx_size or CTX_SIZE)


async def test_a_process_that_hangs_while_it_loads_is_ended_and_said(start: Start) -> None:
    async with start("serve", "hang", "serve") as slept:
        slept.supervisor._policy = replace(QUICK, hang_s=1e-3)
        await slept.to_sleep()
        with pytest.raises(ServiceUnavailable, match="it made no progress"):
            await slept.answer(1)
        await slept.until("sleeping")
