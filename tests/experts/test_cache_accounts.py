"""What the cache counts of copies that fail, whom it begins first, and how long it spares the predicted."""

import numpy as np
import pytest
from cache_cases import eager, settle
from fake_device import Caller

from coldstream.placement.policies import Lru


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
    caller.cache.prefetch(np.array([5]))
    (first,) = caller.launch().copies
    caller.cache.prefetch(np.array([7]))
    caller.copied(first, ok=False)
    assert [copy.expert for copy in caller.launch().copies] == [5]
    caller.end_copies()
    assert [copy.expert for copy in caller.launch().copies] == [7]


@pytest.mark.parametrize("num_calls", [1, 2])
def test_the_predicted_are_spared_until_the_step_after_the_next_has_ended(num_calls: int) -> None:
    caller = Caller([1], 8, {1: 2}, eager())
    caller.load([0, 1])
    settle(caller)
    caller.launch()
    for predicted in ([0, 1],) if num_calls == 1 else ([0], [1]):
        caller.cache.prefetch(np.array(predicted))
    for _ in range(2):  # the running step, and the next
        caller.finish([5, 6])
        assert caller.launch().withdrawn.size == 0
    caller.finish([5, 6])  # the step after it
    assert sorted(caller.launch().withdrawn.tolist()) == [0, 1]
