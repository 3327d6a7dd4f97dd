"""CheckedPolicy: right policies answer through it as alone, each wrong answer is an error that names them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import ConfigError
from coldstream.placement.checked_policy import CheckedPolicy
from coldstream.placement.policies import Changes, DecayedFrequency, Lfu, Lru, Policy, Static, simulate
from coldstream.placement.routing_trace import RoutedModel, RoutingTrace
from random_residency import RandomResidency

CANDIDATES, RESIDENTS = np.array([3, 5]), np.array([0, 1, 2])


class Own(Policy):
    """Answers what a test says."""

    def __init__(self, scores: Any = None, changes: Any = None, max_copies: Any = None) -> None:
        super().__init__(max_copies)
        self._given, self._changes = scores, changes

    def start(self, profile: np.ndarray) -> None:
        self.scores = np.arange(profile.size, dtype=np.float64)

    def observe(self, used: np.ndarray) -> None:
        if self._given is not None:
            self.scores = self._given

    def choose(self, *arguments: Any) -> Changes:
        return self._changes if self._changes is not None else super().choose(*arguments)


class Uncalled(Own):
    def __init__(self) -> None:
        """The base's constructor is forgotten."""
        self._given = self._changes = None


class Writing(Own):
    def observe(self, used: np.ndarray) -> None:
        used[:] = 0


def started(policy: Policy) -> CheckedPolicy:
    checked = CheckedPolicy(policy)
    checked.start(np.zeros(6))
    return checked


@pytest.mark.sharded(6)
@pytest.mark.parametrize(
    "make",
    [Lru, Lfu, Static, DecayedFrequency, lambda: DecayedFrequency(2), lambda: RandomResidency(5), Uncalled],
)
@given(seed=st.integers(0, 100), capacity=st.integers(1, 20))
def test_a_right_policy_holds_what_it_does_alone(make: Any, seed: int, capacity: int) -> None:
    topk_ids = np.random.default_rng(seed).random((60, 2, 12)).argsort(axis=2)[:, :, :2].astype(np.uint16)
    trace = RoutingTrace(RoutedModel("0" * 32, 2, 12, 2), topk_ids)
    expected, found = (simulate(trace, policy, capacity) for policy in (make(), CheckedPolicy(make())))
    for name in ("hits", "misses", "copies", "evictions"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros(5), r"scores must be float64 \[6\], one of each expert, not array"),
        (np.zeros((6, 1)), "scores must be"),
        (np.zeros(6, np.float32), "scores must be"),
        ([0.0] * 6, "scores must be"),
        (np.array([0.0, 1, 2, 3, 4, np.nan]), "a score is not a number"),
    ],
)
def test_wrong_scores(scores: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^policy Own: {message}"):
        started(Own(scores)).observe(np.array([1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, None),
        (Changes(np.array([5]), np.array([2])), None),
        (Changes(np.array([5, 3]), np.array([2])), None),
        (([5], [2]), "choose must return Changes, not"),
        (Changes([5], np.array([2])), "choose must return admitted as an array of integers"),
        (Changes(np.array([5]), np.array([2.0])), "choose must return evicted as an array of integers"),
        (Changes(np.array([4]), np.array([2])), "choose returned as admitted what it was not offered"),
        (Changes(np.array([5]), np.array([3])), "choose returned as evicted what it was not offered"),
        (Changes(np.array([5, 5]), np.array([2])), "choose returned as admitted .* or an expert twice"),
        (Changes(np.array([5, 3]), np.array([2, 2])), "choose returned as evicted .* or an expert twice"),
        (Changes(np.array([5, 3]), np.array([0])[:0]), "choose lets 2 experts in for 0 others and 1 free"),
        (Changes(np.array([5]), np.array([0, 1])), "choose lets 1 experts in for 2 others and 1 free"),
    ],
)
def test_wrong_choices(changes: Any, message: str | None) -> None:
    checked = started(Own(changes=changes))
    if message is None:
        assert checked.choose(CANDIDATES, RESIDENTS, 1).admitted.size > 0
        return
    with pytest.raises(ConfigError, match=f"^policy Own: {message}"):
        checked.choose(CANDIDATES, RESIDENTS, 1)


@pytest.mark.parametrize("max_copies", [-1, 1.5, "4", True])
def test_wrong_limits(max_copies: Any) -> None:
    with pytest.raises(ConfigError, match=r"^policy Own: max_copies must be a number of experts or None"):
        CheckedPolicy(Own(max_copies=max_copies))


def test_a_policy_without_scores() -> None:
    policy = Own()
    policy.start = lambda profile: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"^policy Own: scores must be .* not None"):
        started(policy)


def test_what_a_policy_is_given_it_cannot_change() -> None:
    used = np.array([1, 2])
    with pytest.raises(ConfigError, match=r"^policy Writing: observe raised ValueError: assignment"):
        started(Writing()).observe(used)
    assert used.tolist() == [1, 2]
    used[0] = 3  # its owner can
