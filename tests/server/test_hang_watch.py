"""When an engine counts as hung: its silence has to be seen twice."""

import asyncio
from collections.abc import Sequence

import pytest

from coldstream.server.hang_watch import until_hung

LIMIT_S = 1e-3


async def told(silences: Sequence[float]) -> float | None:
    """What the watch says of these silences, one at each look; None if it wants to see another."""
    left = list(silences)
    asked_too_often = asyncio.Event()

    def silence_s() -> float:
        if not left:
            asked_too_often.set()
            return 0.0
        return left.pop(0)

    watch = asyncio.create_task(until_hung(silence_s, LIMIT_S))
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
    assert await told(silences) == result


@pytest.mark.parametrize(("limit_s", "pause_s"), [(2.0, 0.5), (20.0, 5.0), (600.0, 5.0)])
async def test_it_looks_four_times_within_the_limit_and_every_five_seconds_at_least(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, pause_s: float
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    silences = iter([0.0, limit_s + 1, limit_s + 2])
    assert await until_hung(lambda: next(silences), limit_s) == limit_s + 2
    assert pauses == [pause_s] * 3
