"""A supervised engine process whose engine follows a script: what dies, comes back, and who learns of it."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import psutil
import pytest
from scripted_engine import DIE, FLOOD, FLOOD_CHARS, GARBAGE, HANG, RAISE, REFUSE, WAIT

from coldstream.assets import demo_model_path
from coldstream.decoding import SamplingParams
from coldstream.engine import EngineConfig
from coldstream.engine.answer import Request
from coldstream.engine.events import Delta, Event, Failed, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.submission import Submission
from coldstream.errors import (
    GenerationFault,
    InvalidRequestError,
    ModelChangedError,
    OutOfMemoryError,
    QueueFullError,
)
from coldstream.server import supervisor as supervisor_module
from coldstream.server.client import Health, ServiceUnavailable
from coldstream.server.event_stream import MAX_UNREAD_BYTES, EventStream, SlowReaderError
from coldstream.server.restarts import RestartPolicy
from coldstream.server.supervisor import Supervisor

SCRIPT = Path(__file__).with_name("scripted_engine.py")
QUICK = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, max_deaths=3, cool_down_s=30.0)

LIMITS = EngineLimits()

Start = Callable[..., AbstractAsyncContextManager[Supervisor]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a supervisor whose processes follow a script, a word for each."""

    @asynccontextmanager
    async def started(
        *words: str,
        policy: RestartPolicy = QUICK,
        limits: EngineLimits = LIMITS,
        states: list[str] | None = None,
        model: Path | None = None,
    ) -> AsyncIterator[Supervisor]:
        script = tmp_path / "script"
        script.write_text("\n".join(words or ("serve",)))

        def note(health: Health) -> None:
            if states is not None:
                states.append(health.state)

        supervisor = Supervisor(
            EngineConfig(str(model or demo_model_path())),
            limits,
            name="demo",
            policy=policy,
            command=(sys.executable, str(SCRIPT), str(script)),
            on_state=note,
        )
        async with supervisor:
            yield supervisor

    return started


def submission(request_id: int, *ids: int, max_tokens: int = 3) -> Submission:
    request = Request(None, ids, SamplingParams(), 0, max_tokens, frozenset(), frozenset(), "t", 1)
    return Submission(request_id, request)


async def all_of(stream: EventStream) -> list[Event]:
    return [event async for event in stream]


async def until_ready(supervisor: Supervisor) -> None:
    while (await supervisor.health()).state != "ready":
        await asyncio.sleep(0)
        await asyncio.to_thread(os.sched_yield)


def kill(supervisor: Supervisor) -> None:
    """As kill −9 does."""
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)


async def answer(supervisor: Supervisor, request_id: int) -> str:
    events = await all_of(await supervisor.submit(submission(request_id, 5, 6)))
    assert isinstance(events[0], Started)
    return "".join(event.piece.text for event in events if isinstance(event, Delta))


@pytest.mark.sharded(of="processes")
async def test_events_come_in_order_and_the_stream_ends_after_the_last(start: Start) -> None:
    async with start() as supervisor:
        await supervisor.opened()
        events = await all_of(await supervisor.submit(submission(1, 5, 6)))
        assert [type(event).__name__ for event in events] == ["Started", *["Delta"] * 4]
        assert await answer(supervisor, 2) == "5 6 5 "
        assert (await supervisor.health()).last_progress_age_s == 0


async def test_before_it_is_ready_nothing_is_taken_and_it_says_when_to_come_back(start: Start) -> None:
    async with start("hang") as supervisor:
        with pytest.raises(ServiceUnavailable, match="being loaded") as raised:
            await supervisor.submit(submission(1, 5))
        assert raised.value.retry_after_s >= 1
        with pytest.raises(ServiceUnavailable):
            _ = supervisor.model
        assert (await supervisor.health()).state == "loading"


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [("fail", OutOfMemoryError, "needs 9 GiB"), ("die", GenerationFault, "signal 9")],
)
async def test_what_fails_to_open_at_first_is_not_tried_again(
    start: Start, word: str, kind: type[Exception], message: str
) -> None:
    async with start(word, "serve") as supervisor:
        with pytest.raises(kind, match=message):
            await supervisor.opened()
        assert (await supervisor.health()).state == "failed"
        with pytest.raises(ServiceUnavailable, match=message):
            await supervisor.submit(submission(1, 5))


async def test_a_file_that_is_another_by_now_is_not_served(start: Start) -> None:
    async with start("other") as supervisor:
        with pytest.raises(ModelChangedError, match="was replaced"):
            await supervisor.opened()


async def test_a_dead_engine_gives_each_request_one_error_and_service_returns_by_itself(start: Start) -> None:
    states: list[str] = []
    async with start(states=states) as supervisor:
        await supervisor.opened()
        hanging = [await supervisor.submit(submission(i, WAIT)) for i in range(3)]
        kill(supervisor)
        for request_id, stream in enumerate(hanging):
            events = await all_of(stream)
            failures = [event for event in events if isinstance(event, Failed)]
            assert failures == events[-1:]
            assert failures[0].request_id == request_id
            assert isinstance(failures[0].error, ServiceUnavailable)
            assert "signal 9" in str(failures[0].error)
        assert states == ["ready", "restarting"]
        with pytest.raises(ServiceUnavailable, match="being started again"):
            await supervisor.submit(submission(9, 5))
        await until_ready(supervisor)
        assert await answer(supervisor, 1) == "5 6 5 "  # ids of the old process are free
        assert (await supervisor.health()).restarts == 1


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("kind", [DIE, GARBAGE, RAISE])
async def test_death_garbage_and_errors_of_the_engine_are_one_clear_error_each(
    start: Start, kind: int
) -> None:
    async with start() as supervisor:
        await supervisor.opened()
        events = await all_of(await supervisor.submit(submission(1, kind)))
        assert isinstance(events[-1], Failed)
        assert isinstance(events[-1].error, ServiceUnavailable)
        await until_ready(supervisor)
        assert await answer(supervisor, 2) == "5 6 5 "


async def test_an_engine_that_hangs_is_ended_and_its_requests_get_one_clear_error(start: Start) -> None:
    states: list[str] = []
    policy = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, hang_s=0.2)
    async with start(policy=policy, states=states) as supervisor:
        await supervisor.opened()
        pid = supervisor.pid
        streams = [await supervisor.submit(submission(1, WAIT)), await supervisor.submit(submission(2, HANG))]
        for stream in streams:
            events = await all_of(stream)
            assert [type(event) for event in events if isinstance(event, Failed)] == [Failed]
            assert isinstance(events[-1], Failed)
            assert isinstance(events[-1].error, ServiceUnavailable)
            assert "it made no progress for" in str(events[-1].error)
        await until_ready(supervisor)
        assert supervisor.pid != pid
        assert states == ["ready", "restarting", "ready"]
        assert await answer(supervisor, 3) == "5 6 5 "


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("how", ["stopped", "a step that never returns"])
async def test_an_engine_that_stands_still_is_replaced_long_before_one_that_computes(
    start: Start, how: str
) -> None:
    policy = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, hang_s=3600, still_s=0.2)
    async with start(policy=policy) as supervisor:
        await supervisor.opened()
        pid = supervisor.pid
        assert pid is not None
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        asking = asyncio.create_task(supervisor.submit(submission(1, HANG if how != "stopped" else 5)))
        with pytest.raises(ServiceUnavailable, match="neither computed nor read anything"):
            await all_of_or_raise(asking)
        await until_ready(supervisor)
        assert supervisor.pid != pid
        assert await answer(supervisor, 2) == "5 6 5 "


async def all_of_or_raise(asking: "asyncio.Task[EventStream]") -> None:
    """Raises what a request ends with, whether it was taken or not."""
    for event in await all_of(await asking):
        if isinstance(event, Failed):
            raise event.error


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A model whose file may be written to."""
    return Path(shutil.copy(demo_model_path(), tmp_path / "model.gguf"))


async def until_state(supervisor: Supervisor, *states: str) -> Health:
    while (health := await supervisor.health()).state not in states:
        await asyncio.sleep(0)
        await asyncio.to_thread(os.sched_yield)
    return health


async def test_a_model_that_was_written_to_is_not_served_any_more(start: Start, copied: Path) -> None:
    states: list[str] = []
    async with start(states=states, model=copied) as supervisor:
        await supervisor.opened()
        copied.write_bytes(copied.read_bytes())
        health = await until_state(supervisor, "failed")
        assert health.reason.startswith("model.gguf was written to while in use")
        assert "--restart-on-change" in health.reason
        with pytest.raises(ModelChangedError, match="was written to"):
            await supervisor.submit(submission(1, 5))
        assert supervisor.pid is None
        assert states == ["ready", "failed"]


@pytest.mark.sharded(of="processes")
async def test_a_model_that_was_written_to_is_loaded_anew_if_wanted_and_once_it_is_valid(
    start: Start, copied: Path
) -> None:
    policy = RestartPolicy(0.0, 0.0, max_deaths=2, cool_down_s=0.0, on_change=True)
    async with start(policy=policy, model=copied) as supervisor:
        await supervisor.opened()
        whole = copied.read_bytes()
        copied.write_bytes(whole)
        while not (await supervisor.health()).restarts:
            await asyncio.to_thread(os.sched_yield)
        await until_ready(supervisor)
        assert await answer(supervisor, 1) == "5 6 5 "
        copied.write_bytes(whole[: len(whole) // 2])
        while "the file is incomplete" not in (reason := (await supervisor.health()).reason):
            await asyncio.to_thread(os.sched_yield)
        assert reason.startswith("model.gguf: ")  # and does not say where on this machine it is
        with pytest.raises(ServiceUnavailable):
            await supervisor.submit(submission(2, 5))
        copied.write_bytes(whole)
        await until_ready(supervisor)
        assert await answer(supervisor, 3) == "5 6 5 "


async def test_the_breaker_opens_after_deaths_in_a_row_and_starts_no_process_meanwhile(start: Start) -> None:
    states: list[str] = []
    async with start("serve", "die", states=states) as supervisor:
        await supervisor.opened()
        await all_of(await supervisor.submit(submission(1, DIE)))
        while (await supervisor.health()).state != "failed":
            await asyncio.to_thread(os.sched_yield)
        assert states == ["ready", "restarting", "restarting", "failed"]
        health = await supervisor.health()
        assert health.restarts == QUICK.max_deaths
        assert health.retry_after_s > QUICK.cool_down_s / 2
        with pytest.raises(ServiceUnavailable, match="cannot be kept running") as raised:
            await supervisor.submit(submission(2, 5))
        assert raised.value.retry_after_s > QUICK.cool_down_s / 2
        assert supervisor.pid is None


async def test_after_the_cool_down_one_start_is_tried(start: Start) -> None:
    policy = RestartPolicy(0.0, 0.0, max_deaths=1, cool_down_s=0.0)
    states: list[str] = []
    async with start("serve", "die", "serve", policy=policy, states=states) as supervisor:
        await supervisor.opened()
        await all_of(await supervisor.submit(submission(1, DIE)))
        await until_ready(supervisor)
        assert states == ["ready", "failed", "failed", "ready"]
        assert await answer(supervisor, 2) == "5 6 5 "


async def test_tokens_in_between_keep_the_breaker_closed(start: Start) -> None:
    states: list[str] = []
    async with start(states=states) as supervisor:
        await supervisor.opened()
        for _ in range(QUICK.max_deaths + 1):
            unfinished = await supervisor.submit(submission(1, 5, max_tokens=4000))
            assert isinstance(await anext(unfinished), Started)
            assert isinstance(await anext(unfinished), Delta)
            kill(supervisor)
            await all_of(unfinished)
            await until_ready(supervisor)
            assert "failed" not in states


async def test_a_model_that_was_replaced_is_read_again_and_one_that_was_not_is_kept(start: Start) -> None:
    async with start("serve", "serve", "other") as supervisor:
        model = await supervisor.opened()
        kill(supervisor)
        while (await supervisor.health()).restarts < 1:
            await asyncio.to_thread(os.sched_yield)
        await until_ready(supervisor)
        assert supervisor.model.tokenizer is model.tokenizer
        kill(supervisor)
        while (await supervisor.health()).restarts < 2:
            await asyncio.to_thread(os.sched_yield)
        while "was replaced" not in (await supervisor.health()).reason:
            await asyncio.to_thread(os.sched_yield)
        with pytest.raises(ServiceUnavailable, match="was replaced"):
            await supervisor.submit(submission(1, 5))


async def test_a_refused_request_raises_and_leaves_nothing(start: Start) -> None:
    async with start() as supervisor:
        await supervisor.opened()
        with pytest.raises(InvalidRequestError, match="prompt: refused"):
            await supervisor.submit(submission(1, REFUSE))
        assert await answer(supervisor, 1) == "5 6 5 "


async def test_more_requests_than_the_queue_holds_are_refused_at_once(start: Start) -> None:
    async with start(limits=EngineLimits(max_running=1, max_waiting=1)) as supervisor:
        await supervisor.opened()
        hung = await supervisor.submit(submission(0, HANG))
        waiting = asyncio.create_task(supervisor.submit(submission(1, 5)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="under way"):
            await supervisor.submit(submission(2, 5))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await hung.aclose()
        kill(supervisor)


@pytest.mark.sharded(of="processes")
async def test_trap_52_cancelling_ends_a_request_and_closing_its_stream_forgets_it(start: Start) -> None:
    async with start() as supervisor:
        await supervisor.opened()
        kept = await supervisor.submit(submission(1, 5, max_tokens=4000))
        left = await supervisor.submit(submission(2, 5, max_tokens=4000))
        assert isinstance(await anext(left), Started)
        await left.aclose()
        await left.aclose()
        assert await all_of(left) == []
        await supervisor.cancel(1)
        await supervisor.cancel(77)
        events = await all_of(kept)
        assert isinstance(events[-1], Delta)
        assert events[-1].piece.finish_reason is not None
        assert len(events) < 4000
        assert await answer(supervisor, 3) == "5 6 5 "


async def test_a_slow_reader_is_disconnected_and_others_are_not_held_up(start: Start) -> None:
    async with start() as supervisor:
        await supervisor.opened()
        slow = await supervisor.submit(submission(1, FLOOD, max_tokens=4000))
        assert await answer(supervisor, 2) == "5 6 5 "
        while not slow.has_ended:
            await asyncio.to_thread(os.sched_yield)
        assert await answer(supervisor, 3) == "5 6 5 "
        events = await all_of(slow)
        assert isinstance(events[-1], Failed)
        assert isinstance(events[-1].error, SlowReaderError)
        assert sum(len(event.piece.text) for event in events if isinstance(event, Delta)) <= MAX_UNREAD_BYTES
        assert len(events) > MAX_UNREAD_BYTES // (2 * FLOOD_CHARS)


async def test_an_engine_whose_parent_reads_nothing_stops_computing(start: Start) -> None:
    """The socket fills up, then what the engine process keeps; the rest of the answer is not computed."""
    async with start() as supervisor:
        await supervisor.opened()
        stream = await supervisor.submit(submission(1, FLOOD, max_tokens=4000))
        assert supervisor.pid is not None
        process = psutil.Process(supervisor.pid)
        before = process.memory_info().rss
        while process.status() != psutil.STATUS_SLEEPING:  # nothing is read, as the event loop does not run
            os.sched_yield()
        assert not stream.has_ended
        assert process.memory_info().rss < before + 64 * FLOOD_CHARS < before + 3999 * FLOOD_CHARS
        assert await answer(supervisor, 2) == "5 6 5 "


async def test_health_tells_of_an_engine_that_does_not_move(start: Start) -> None:
    async with start() as supervisor:
        await supervisor.opened()
        stream = await supervisor.submit(submission(1, HANG))
        first = (await supervisor.health()).last_progress_age_s
        await asyncio.to_thread(os.sched_yield)
        assert (await supervisor.health()).last_progress_age_s > first
        await stream.aclose()
        assert (await supervisor.health()).last_progress_age_s == 0
        kill(supervisor)


async def test_statistics_of_an_engine_that_does_not_answer_are_refused_and_nothing_waits(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "COUNT_S", 0.0)
    async with start() as supervisor:
        await supervisor.opened()
        await supervisor.submit(submission(1, HANG))
        with pytest.raises(ServiceUnavailable, match="step that takes long"):
            await supervisor.statistics()
        kill(supervisor)


async def test_trap_52_draining_lets_requests_finish_and_takes_no_more(start: Start) -> None:
    async with start() as supervisor:
        await supervisor.opened()
        stream = await supervisor.submit(submission(1, 5, 6, max_tokens=300))
        draining = asyncio.create_task(supervisor.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(ServiceUnavailable, match="server stops"):
            await supervisor.submit(submission(2, 5))
        events = await all_of(stream)
        await draining
        assert isinstance(events[-1], Delta)
        assert len(events) == 302


@pytest.mark.sharded(of="processes")
async def test_what_is_not_drained_in_time_ends_with_an_error(start: Start) -> None:
    async with start() as supervisor:
        await supervisor.opened()
        stream = await supervisor.submit(submission(1, HANG))
        await supervisor.drain(0.0)
        events = await all_of(stream)
        assert isinstance(events[-1], Failed)
        assert "server stops" in str(events[-1].error)
        kill(supervisor)


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("word", ["serve", "hang"])
async def test_closing_leaves_no_process(start: Start, word: str) -> None:
    async with start(word) as supervisor:
        if word == "serve":
            await supervisor.opened()
        while supervisor.pid is None:
            await asyncio.sleep(0)
        process = psutil.Process(supervisor.pid)
    assert not process.is_running()
