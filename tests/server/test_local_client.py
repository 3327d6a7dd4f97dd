"""An engine in this process behind the client's interface."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from coldstream.decoding import SamplingParams
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta, Event, Failed, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.submission import Submission
from coldstream.errors import InvalidRequestError, QueueFullError
from coldstream.kvcache import PrefixRam
from coldstream.server.client import ServiceUnavailable
from coldstream.server.event_stream import SlowReaderError
from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from hash_runner import open_hash_model

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)  # until the context is full


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    opened = open_hash_model(tmp_path / "tiny.gguf")
    with LocalClient(opened, "tiny", EngineLimits(max_running=2, max_waiting=1)) as client:
        yield client
    opened.close()


class Gate:
    """Lets the engine make so many steps, until it is opened for all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int = 0) -> None:
        self._steps = threading.Semaphore(steps)
        step = Engine.step

        def counted(engine: Engine) -> list[Event]:
            self._steps.acquire()
            return step(engine)

        monkeypatch.setattr(Engine, "step", counted)

    def open(self) -> None:
        self._steps.release(1 << 20)


def submission(client: LocalClient, request_id: int, params: SamplingParams = PARAMS) -> Submission:
    return Submission(request_id, client.model.requests.of_prompt("def", "prompt", params))


async def events_of(client: LocalClient, request_id: int, params: SamplingParams = PARAMS) -> list[Event]:
    return [event async for event in await client.submit(submission(client, request_id, params))]


async def test_events_come_in_order_and_end_with_the_last_answer(client: LocalClient) -> None:
    first, *others = await events_of(client, 1, SamplingParams(max_tokens=3, n=2, ignore_eos=True, seed=1))
    assert isinstance(first, Started)
    deltas = [event for event in others if isinstance(event, Delta)]
    assert len(deltas) == len(others)
    for index in (0, 1):
        own = [event.piece for event in deltas if event.index == index]
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]
        assert sum(len(piece.token_ids) for piece in own) == 3


async def test_requests_side_by_side_are_each_what_they_are_alone(client: LocalClient) -> None:
    alone = await events_of(client, 1)
    both = await asyncio.gather(events_of(client, 2), events_of(client, 3))

    def tokens(events: list[Event]) -> list[int]:
        return [token for event in events if isinstance(event, Delta) for token in event.piece.token_ids]

    assert [tokens(events) for events in both] == [tokens(alone)] * 2


async def test_refusals_are_raised_and_leave_nothing_behind(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    first = await client.submit(submission(client, 1, long))
    with pytest.raises(InvalidRequestError, match="request 1"):
        await client.submit(submission(client, 1))
    submits = [asyncio.create_task(client.submit(submission(client, i, long))) for i in (2, 3, 4)]
    await asyncio.sleep(0)
    gate.open()
    second, third, fourth = await asyncio.gather(*submits, return_exceptions=True)
    assert isinstance(fourth, QueueFullError)
    for events in (first, second, third):
        assert not isinstance(events, BaseException)
        assert isinstance([event async for event in events][-1], Delta)
    assert len(await events_of(client, 4)) > 1


@pytest.mark.sharded(of="processes")
async def test_sc03_exactly_the_overflow_has_to_come_back_and_the_rest_is_answered(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    transport = httpx2.ASGITransport(create_app(client, ServerSettings()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        body = {"prompt": "def", "max_tokens": 50, "ignore_eos": True}
        asking = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(20)]
        while len(client._streams) + sum(task.done() for task in asking) < len(asking):
            await asyncio.sleep(0)
        gate.open()
        answers = await asyncio.gather(*asking)
        later = await http.post("/v1/completions", json=body)
    statuses = [answer.status_code for answer in answers]
    assert (statuses.count(200), statuses.count(429)) == (3, 17)
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
        else:
            assert answer.json()["usage"]["completion_tokens"] == 50
    assert later.status_code == 200


async def test_prefixes_that_have_no_room_go_to_the_tiers_it_is_given(tmp_path: Path) -> None:
    opened = open_hash_model(tmp_path / "tiny.gguf")
    with LocalClient(opened, "tiny", tiers=[PrefixRam(1 << 20)]) as client:
        await events_of(client, 1)
        (tier,) = (await client.statistics()).prefixes.tiers
    opened.close()
    assert (tier.name, tier.budget_bytes) == ("ram", 1 << 20)


async def test_closing_the_events_cancels_the_request(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, steps=3)
    events = await client.submit(submission(client, 1, ENDLESS))
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    gate.open()
    await events_of(client, 2)
    assert (await client.statistics()).cancelled_requests == 1


async def test_a_cancelled_request_ends_as_cancelled(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, steps=3)
    events = await client.submit(submission(client, 1, ENDLESS))
    await anext(events)
    await client.cancel(1)
    await client.cancel(99)
    gate.open()
    *_, last = [event async for event in events]
    assert isinstance(last, Delta)
    assert last.piece.finish_reason == "cancelled"


async def test_closing_the_client_fails_what_runs_and_refuses_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, steps=3)
    opened = open_hash_model(tmp_path / "tiny.gguf")
    client = LocalClient(opened, "tiny")
    events = await client.submit(submission(client, 1, ENDLESS))
    closing = asyncio.create_task(asyncio.to_thread(client.close))
    while (await client.health()).state != "stopping":
        await asyncio.sleep(0)
    gate.open()
    await closing
    client.close()
    *_, last = [event async for event in events]
    assert isinstance(last, Failed)
    assert isinstance(last.error, ServiceUnavailable)
    with pytest.raises(ServiceUnavailable):
        await client.submit(submission(client, 2))
    with pytest.raises(ServiceUnavailable):
        await client.statistics()
    opened.close()


async def test_an_engine_that_breaks_fails_its_requests_and_says_so(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> list[Event]:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("coldstream.engine.engine.Engine.step", broken)
    (last,) = await events_of(client, 1)
    assert isinstance(last, Failed)
    assert (await client.health()).state == "failed"
    assert "a defect" in (await client.health()).reason
    with pytest.raises(ServiceUnavailable, match="a defect"):
        await client.submit(submission(client, 2))


async def test_sc05_a_reader_that_falls_too_far_behind_is_ended_and_others_go_on(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, steps=8)
    with monkeypatch.context() as patched:
        patched.setattr("coldstream.server.event_stream.MAX_UNREAD_BYTES", 200)
        events = await client.submit(submission(client, 1, ENDLESS))
        while not events.has_ended:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
    gate.open()
    *_, last = [event async for event in events]
    assert isinstance(last, Failed)
    assert isinstance(last.error, SlowReaderError)
    assert isinstance((await events_of(client, 2))[-1], Delta)
    assert (await client.statistics()).cancelled_requests == 1


async def test_a_question_that_waits_for_a_step_that_fails_is_answered(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def fails(engine: Engine) -> list[Event]:
        begun.set()
        goes_on.wait()
        raise RuntimeError("broken")

    monkeypatch.setattr(Engine, "step", fails)
    stream = await client.submit(submission(client, 1))
    await asyncio.to_thread(begun.wait)
    asked = [asyncio.create_task(client.live()) for _ in range(3)]
    while len(client._work) < 3:
        await asyncio.sleep(0)
    goes_on.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*asked, return_exceptions=True)
        *_, last = [event async for event in stream]
        assert isinstance(last, Failed)
        assert "broken" in str(last.error)
        with pytest.raises(ServiceUnavailable, match="broken"):
            await client.live()
