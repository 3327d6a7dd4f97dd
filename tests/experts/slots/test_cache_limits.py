"""Limits, sizes, and slots that come and go: one promise a test."""

import numpy as np
import pytest
from cache_cases import drifting, eager, settle
from fake_device import NOTHING, Caller

from coldstream.experts import ExpertCache
from coldstream.placement.policies import (
    DecayedFrequency,
    Lfu,
    Lru,
    Static,
    numbers,
)


def test_copies_in_flight_keep_below_the_limit() -> None:
    caller = Caller([3], 16, {3: 16}, Lfu(), max_bytes_per_step=7)
    caller.launch()
    caller.launch()
    caller.finish(range(8))
    assert len(caller.launch().copies) == 2
    assert not caller.launch().copies
    caller.copied(caller.device.writing[0])
    assert not caller.launch().copies, "what the limit cut off was not put aside"
    caller.finish([10, 11, 12])
    assert [copy.expert for copy in caller.launch().copies] == [10]
    caller.end_copies()
    assert [copy.expert for copy in caller.launch().copies] == [11]


def test_nothing_is_withdrawn_for_what_the_limit_leaves_out() -> None:
    caller = Caller([3], 16, {3: 6}, Lru(), max_bytes_per_step=9)
    caller.load(range(5))
    settle(caller)
    caller.launch()
    caller.launch()
    caller.finish(range(8, 13))
    caller.finish(range(13, 16))
    start = caller.launch()
    assert len(start.copies) == 3
    assert start.withdrawn.tolist() == [4, 3], "the third found a free slot"
    assert not caller.launch().copies
    caller.check()


def test_a_large_expert_is_not_overtaken() -> None:
    caller = Caller([2, 5], 8, {2: 8, 5: 8}, Lfu(), max_bytes_per_step=8)
    caller.step([0, 1])
    assert len(caller.launch().copies) == 2  # 4 bytes in flight
    caller.launch()
    caller.finish([8])
    caller.finish([2])
    assert not caller.launch().copies
    caller.end_copies()
    assert [copy.expert for copy in caller.launch().copies] == [8, 2]


def test_trap_18_sizes_without_slots_starve_no_other_size() -> None:
    caller = Caller([3, 3, 5, 4], 8, {3: 10, 4: 1}, Lru(), max_bytes_per_step=12)
    for used in numbers(drifting(0, 4, 8, 4, 60)):
        caller.step(used)
    counters = caller.cache.counters
    assert counters.evictions[0] > 5
    assert counters.evictions[1] > 5
    assert counters.evictions[3] > 5
    assert counters.copies[2] == 0
    assert counters.misses[2] == 60 * 4


def test_trap_12_numbers_that_are_no_experts_are_refused_before_anything_changes() -> None:
    caller = Caller([1], 4, {1: 2}, eager())
    caller.launch()
    cache = caller.cache
    for wrong in ([-1], [0, 4], [1, 1]):
        with pytest.raises(ValueError, match="expert"):
            cache.finish_step(0, np.array(wrong))
    for step in (-1, 1, 2):
        with pytest.raises(ValueError, match="cannot end"):
            cache.finish_step(step, NOTHING)
    for experts in ([0, 0], [4], [0, 1, 2]):
        with pytest.raises(ValueError, match="expert"):
            cache.load(experts)
    with pytest.raises(ValueError, match="no expert has"):
        ExpertCache([1], 4, {2: 2}, eager())
    with pytest.raises(ValueError, match="negative"):
        cache.resize(1, -1)
    caller.check()
    caller.finish([0])
    with pytest.raises(ValueError, match="already"):
        cache.load([0])
    assert [copy.expert for copy in caller.launch().copies] == [0]
    assert cache.counters.misses.sum() == 1


# ---- slots that come and go


def test_what_was_loaded_first_is_taken_away_last() -> None:
    caller = Caller([1], 8, {1: 4}, Static())
    caller.load([6, 2, 7, 1])
    settle(caller)
    for num_slots, left in ((3, {6, 2, 7}), (1, {6}), (0, set())):
        caller.resize(1, num_slots)
        caller.launch()
        assert caller.readable == left
        caller.finish()


def test_mm03_memory_taken_away_mid_run_is_freed_after_its_last_read_and_used_again_later() -> None:
    caller = Caller([1], 16, {1: 8}, DecayedFrequency())
    caller.load(range(8))
    settle(caller)
    caller.launch()
    caller.launch()
    caller.resize(1, 3)
    assert sorted(caller.launch().withdrawn.tolist()) == [3, 4, 5, 6, 7]
    caller.finish([3, 4, 9])
    assert not caller.cache.reclaimed(1)
    caller.finish([3, 4, 9])
    assert caller.cache.reclaimed(1)
    for used in ([3, 7], [3, 7], [4, 7], [3, 4]):
        caller.step(used)
        assert len(caller.readable) <= 3
    caller.resize(1, 8)
    for used in ([3, 9, 5], [4, 7, 8], [3, 4], []):
        caller.step(used)
    assert {3, 4, 5, 7, 8, 9} <= caller.readable
    caller.quiesce()


def test_slots_lent_between_prefills() -> None:
    """The ring of a streamed prefill: its memory is slots as long as nothing streams."""
    caller = Caller([1], 16, {1: 4}, Lru())
    for _ in range(3):
        caller.resize(1, 10)
        for used in (range(6), range(4, 10), range(10), []):
            caller.step(used)
        settle(caller)
        assert len(caller.readable) == 10
        caller.resize(1, 4)
        assert caller.launch().withdrawn.size == 6
        assert caller.cache.reclaimed(1)
        caller.finish(range(16), trains=False)
        assert len(caller.readable) == 4


def test_what_was_decided_for_slots_taken_away_is_forgotten() -> None:
    caller = Caller([1], 16, {1: 4}, Lfu(), max_bytes_per_step=4)
    caller.launch()
    caller.finish([0, 1, 2, 3])
    caller.resize(1, 2)
    assert [copy.expert for copy in caller.launch().copies] == [0, 1]
    caller.check()
    caller.finish([3])
    assert not caller.launch().copies
