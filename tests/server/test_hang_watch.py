"""When an engine counts as hung: it is silent, or stands still, at two looks in turn."""

import asyncio
import os
from collections.abc import Sequence

import pytest

from coldstream.server.hang_watch import Stillness, Work, until_hung, work_of
from coldstream.server.restarts import RestartPolicy

LIMIT_S = 1e-3
POLICY = RestartPolicy(hang_s=LIMIT_S)
STILL = Work(1.0, 0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks other tasks run once, however long the pause."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))


async def reported(
    silences: Sequence[float], policy: RestartPolicy = POLICY, works: Sequence[Work | None] = ()
) -> str | None:
    """What the watch says of these silences, one at each look a second; None if it wants to see another."""
    left, work_left = list(silences), list(works)
    asked_too_often = asyncio.Event()
    seconds = iter(range(1000))

    def silence_s() -> float:
        if not left:
            asked_too_often.set()
            return 0.0
        return left.pop(0)

    def work() -> Work | None:
        return work_left.pop(0) if work_left else None

    watch = asyncio.create_task(until_hung(silence_s, work, policy, lambda: next(seconds)))
    waits = asyncio.create_task(asked_too_often.wait())
    await asyncio.wait({watch, waits}, return_when=asyncio.FIRST_COMPLETED)
    waits.cancel()
    if watch.done():
        assert left == []
        return watch.result()
    watch.cancel()
    return None


@pytest.mark.parametrize(
    ("silences", "result"),
    [
        ([2, 3], 3),
        ([0, 2, 3], 3),
        ([2, 0, 2, 5], 5),
        ([2], None),
        ([2, 0, 2, 0], None),
        ([LIMIT_S, LIMIT_S, LIMIT_S], None),
        ([0, 0, 0], None),
    ],
)
async def test_sc09_silence_beyond_the_limit_counts_when_it_is_seen_twice_in_turn(
    silences: list[float], result: float | None
) -> None:
    expected = None if result is None else f"it made no progress for {result} s"
    assert await reported(silences) == expected


SLOW = RestartPolicy(hang_s=100, still_s=2 + LIMIT_S)
SAYS = "it made no progress for 9 s, and neither computed nor read anything"


@pytest.mark.parametrize(
    ("works", "result"),
    [
        ([STILL] * 5, SAYS),  # since the first look, 0 s; beyond the limit at 3 and 4 s
        ([STILL] * 4, None),
        ([None] * 9, None),
        ([STILL, None, STILL, STILL, STILL], None),
        ([Work(1.0 + 0.01 * i, 0) for i in range(9)], None),
        ([Work(1.0, i) for i in range(9)], None),
        ([Work(1.0 + 0.009 * i, 0) for i in range(5)], SAYS),
        ([Work(1.0, 0), Work(2.0, 0), *[Work(2.0, 0)] * 4], SAYS),
        ([Work(1.0, 0), Work(2.0, 0), *[Work(2.0, 0)] * 3], None),
    ],
)
async def test_sc09_what_computes_or_reads_does_not_stand_still(
    works: list[Work | None], result: str | None
) -> None:
    assert await reported([9] * len(works), SLOW, works) == result


async def test_sc09_what_gives_signs_of_life_or_has_nothing_to_do_does_not_stand_still() -> None:
    assert await reported([0] * 9, SLOW, [STILL] * 9) is None
    assert await reported([1] * 9, SLOW, [STILL] * 9) is None


def test_sc09_stillness_begins_with_the_first_look() -> None:
    stillness = Stillness()
    assert [stillness.seconds(now, STILL) for now in (100.0, 101.0, 105.0)] == [0.0, 1.0, 5.0]
    assert stillness.seconds(106.0, Work(2.0, 0)) == 0.0


def test_sc09_work_is_read_of_a_process_that_lives() -> None:
    before = work_of(os.getpid())
    while (after := work_of(os.getpid())) == before:  # it computes here
        continue
    assert before is not None
    assert after is not None
    assert after.processor_s > before.processor_s or after.read_bytes > before.read_bytes
    assert work_of(2**30) is None


@pytest.mark.parametrize(("limit_s", "pause_s"), [(2.0, 0.5), (20.0, 5.0), (600.0, 5.0)])
async def test_it_looks_four_times_within_the_limit_and_every_five_seconds_at_least(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, pause_s: float
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    silences = iter([0.0, limit_s + 1, limit_s + 2])
    policy = RestartPolicy(hang_s=limit_s, still_s=1000)
    assert str(limit_s + 2)[:-2] in await until_hung(lambda: next(silences), lambda: None, policy)
    assert pauses == [pause_s] * 3
