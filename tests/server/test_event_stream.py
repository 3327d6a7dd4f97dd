"""The events of one request on their way to its reader."""

import asyncio

from coldstream.engine.events import Delta, Event, Failed, Started
from coldstream.engine.request import Logprob, Piece
from coldstream.errors import GenerationFault
from coldstream.server.event_stream import MAX_UNREAD_BYTES, EventStream, SlowReaderError, size_of

LOGPROB = Logprob(-1.0, 1, "a")


def stream(num_answers: int = 1) -> tuple[EventStream, list[EventStream]]:
    left: list[EventStream] = []
    return EventStream(1, num_answers, left.append), left


def last(index: int) -> Delta:
    return Delta(1, index, Piece("", finish_reason="stop"))


def of_bytes(size: int) -> Delta:
    """A delta of so many bytes by `size_of`."""
    delta = Delta(1, 0, Piece("a" * (size - size_of(Delta(1, 0, Piece(""))))))
    assert size_of(delta) == size
    return delta


async def test_it_ends_after_the_last_event_of_the_last_answer() -> None:
    events, left = stream(num_answers=2)
    pushed: list[Event] = [Started(1, 0, 3), last(1), Delta(1, 0, Piece("a")), last(0)]
    for event in pushed:
        assert not events.has_ended
        assert events.push(event)
    assert events.has_ended
    assert [event async for event in events] == pushed
    await events.aclose()
    assert left == []


async def test_a_failure_is_the_last_event_whatever_comes_after_it() -> None:
    events, _ = stream()
    error = GenerationFault("logits that are not finite")
    events.push(Delta(1, 0, Piece("a")))
    events.fail(error)
    events.fail(GenerationFault("another"))
    assert events.push(last(0))
    assert [event async for event in events] == [Delta(1, 0, Piece("a")), Failed(1, error)]


async def test_unread_bytes_are_bounded_and_the_last_event_is_taken_beyond_the_bound() -> None:
    events, _ = stream()
    assert events.push(of_bytes(MAX_UNREAD_BYTES))
    assert events.push(last(0))
    assert [event async for event in events][-1] == last(0)
    events, _ = stream()
    assert events.push(of_bytes(MAX_UNREAD_BYTES))
    assert not events.push(Delta(1, 0, Piece("b")))
    assert events.push(Delta(1, 0, Piece("c")))  # of an engine that has not heard of it yet
    first, failed = [event async for event in events]
    assert first == of_bytes(MAX_UNREAD_BYTES)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, SlowReaderError)


async def test_a_batch_is_all_that_has_come_and_none_after_the_end() -> None:
    events, _ = stream()
    events.push(Started(1, 0, 3))
    events.push(of_bytes(MAX_UNREAD_BYTES - size_of(Started(1, 0, 3))))
    assert await events.batch() == [Started(1, 0, 3), of_bytes(MAX_UNREAD_BYTES - size_of(Started(1, 0, 3)))]
    waiting = asyncio.create_task(events.batch())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert events.push(of_bytes(MAX_UNREAD_BYTES))  # as what was read made room
    assert await waiting == [of_bytes(MAX_UNREAD_BYTES)]
    events.push(last(0))
    assert await events.batch() == [last(0)]
    assert await events.batch() == []


async def test_reading_makes_room() -> None:
    events, _ = stream()
    for _ in range(3):
        assert events.push(of_bytes(MAX_UNREAD_BYTES))
        await anext(events)


async def test_waiting_for_an_event_may_be_cancelled_and_loses_none() -> None:
    events, left = stream()
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    events.push(Started(1, 0, 3))
    assert await anext(events) == Started(1, 0, 3)
    assert left == []


async def test_leaving_early_is_reported_once_and_ends_who_waits() -> None:
    events, left = stream()
    waiting = asyncio.ensure_future(anext(events, None))
    await asyncio.sleep(0)
    await events.aclose()
    await events.aclose()
    assert await waiting is None
    assert left == [events]


async def test_a_watched_event_is_set_by_all_that_comes_and_by_the_end() -> None:
    events, _ = stream()
    arrived = asyncio.Event()
    events.push(Started(1, 0, 3))
    events.watch(arrived)
    assert arrived.is_set()
    assert (events.take(), events.take(), events.is_over) == (Started(1, 0, 3), None, False)
    arrived.clear()
    events.fail(GenerationFault("lost"))
    assert arrived.is_set()
    assert not events.is_over
    assert isinstance(events.take(), Failed)
    assert events.is_over
    arrived.clear()
    events.watch(arrived)
    assert arrived.is_set()


def test_log_probabilities_count_as_unread() -> None:
    plain, ranked = (Delta(1, 0, Piece("a", (1,), logprobs)) for logprobs in (None, ({1: LOGPROB},)))
    assert size_of(ranked) > size_of(plain)
