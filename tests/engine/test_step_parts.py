"""The parts of steps' time: they add up, and they only grow, whatever becomes of requests and of engines."""

from dataclasses import fields, replace
from pathlib import Path
from random import Random

import pytest
from engine_clients import FakeClock, engine_of
from hypothesis import given
from hypothesis import strategies as st
from test_engine_core import SAMPLED, opened_model, path

from coldstream.engine.engine_statistics import EngineStatistics
from coldstream.experts.gpu_statistics import PARTS, ExpertTimes
from coldstream.kvcache import CacheSize, PrefixStatistics

__all__ = ["path"]

STEP_PARTS = ("draft_s", "launch_s", "wait_s", "token_s")
OF_NOW = ("running", "waiting", "memory", "free_memory", "prefixes")
COUNTS = [each.name for each in fields(EngineStatistics) if each.name not in (*OF_NOW, "expert_times")]


@pytest.mark.parametrize("cancelled_at", [1, 4, 9])
def test_parts_of_two_sequences_add_up_and_grow_also_where_one_is_cancelled(
    path: Path, cancelled_at: int
) -> None:
    random, clock = Random(cancelled_at), FakeClock()
    with opened_model(path) as opened, engine_of(opened, clock=clock) as client:
        ids = [client.add([each] * 40, SAMPLED) for each in range(2)]
        before = client.engine.live().statistics
        for number in range(200):
            if client.engine.is_idle:
                break
            if number == cancelled_at:
                client.engine.cancel(ids[0])
            clock.tick = random.uniform(0.001, 0.1)
            client.step()
            now = client.engine.live().statistics
            for part in (*STEP_PARTS, "step_s"):
                assert getattr(now, part) >= getattr(before, part), part
            assert sum(getattr(now, part) for part in STEP_PARTS) == pytest.approx(now.step_s)
            before = now
        assert client.engine.statistics().cancelled_requests == 1
        assert client.is_over(ids[1])
        assert min(before.launch_s, before.wait_s, before.token_s) > 0
        assert before.draft_s == 0  # nothing drafts


NUMBERS = st.integers(0, 2**30)
TIMES = st.builds(
    ExpertTimes,
    NUMBERS,
    st.tuples(*[NUMBERS.map(float)] * len(PARTS)),
    NUMBERS.map(float),
    NUMBERS.map(float),
    NUMBERS,
)
PREFIXES = st.builds(PrefixStatistics, *[NUMBERS] * 3, kept=NUMBERS)
STATISTICS = st.builds(
    EngineStatistics,
    memory=st.builds(CacheSize, NUMBERS, NUMBERS),
    free_memory=st.builds(CacheSize, NUMBERS, NUMBERS),
    prefixes=PREFIXES,
    expert_times=st.none() | TIMES,
    **dict.fromkeys((*COUNTS, "running", "waiting"), NUMBERS),
)


@given(st.lists(STATISTICS, min_size=1, max_size=4))
def test_counts_of_engines_one_after_the_other_only_grow_and_lose_nothing(
    engines: list[EngineStatistics],
) -> None:
    """What is of now is that of the last one. An engine with all experts at hand has no times for them."""
    before: EngineStatistics | None = None
    for now in engines:
        total = now.going_on(before)
        for name in OF_NOW[:-1]:
            assert getattr(total, name) == getattr(now, name)
        assert total.prefixes.kept == now.prefixes.kept
        for name in COUNTS:
            assert getattr(total, name) == getattr(now, name) + (getattr(before, name) if before else 0)
        counted = [each for each in (now, before) if each and each.expert_times]
        assert (total.expert_times is None) == (not counted)
        for each in (each.expert_times for each in counted):
            assert each is not None
            assert total.expert_times is not None
            assert total.expert_times.disk >= each.disk
            assert all(a >= b for a, b in zip(total.expert_times.layers, each.layers, strict=True))
        before = total
    assert replace(engines[0]).going_on(None) == engines[0]
