"""The cache's counts of steps and failed copies, and the order in which it begins copies."""

from cache_cases import eager, settle
from fake_device import Caller

from coldstream.placement.policies import Lru, Static


def test_a_whole_step_uses_a_layer_and_misses_nothing_of_it() -> None:
    caller = Caller([1, 1, 1], 4, {1: 3}, Static())
    caller.load([0, 1, 4])
    settle(caller)
    counters = caller.cache.counters
    for used, whole in (([0, 1, 4], [1, 1, 0]), ([0, 2, 4], [1, 2, 0]), ([5], [1, 2, 0]), ([1], [2, 2, 0])):
        caller.step(used)
        assert counters.whole_steps.tolist() == whole
    caller.step([0, 4], trains=False)
    assert counters.whole_steps.tolist() == [2, 2, 0]


def test_ex01_failed_copies_are_counted_in_their_layer() -> None:
    caller = Caller([1, 1], 4, {1: 2}, eager())
    counters = caller.cache.counters
    caller.step([6])
    for failed in (1, 2):
        (copy,) = caller.launch().copies
        caller.copied(copy, ok=False)
        assert counters.failed_copies.tolist() == [0, failed]
        caller.finish(trains=False)
    assert counters.copies.tolist() == [0, 2]


def test_ex01_a_failed_copy_is_begun_again_before_those_that_wait() -> None:
    caller = Caller([1], 16, {1: 8}, Lru(), max_bytes_per_step=1)
    caller.step([5])
    (first,) = caller.launch().copies
    caller.finish([7])
    caller.copied(first, ok=False)
    assert [copy.expert for copy in caller.launch().copies] == [5]
    caller.end_copies()
    assert [copy.expert for copy in caller.launch().copies] == [7]
