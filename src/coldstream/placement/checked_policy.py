"""Checks the answers of a caller's policy. Pure.

Unchecked, a mistake would show far from the policy or never, such as the eviction of an expert that is not
resident. Each mistake is a ConfigError that names the policy's class.
"""

from collections.abc import Callable
from typing import NoReturn, TypeVar

import numpy as np

from coldstream.errors import ConfigError, shown
from coldstream.placement.policies import Array, Changes, Policy

Result = TypeVar("Result")


class CheckedPolicy(Policy):
    """Calls `policy`. Raises ConfigError if it raises or returns an invalid answer.

    The arrays that it receives are read-only.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._name = type(policy).__name__
        count: object = policy.max_copies
        if count is not None and not (type(count) is int and count >= 0):
            self._refuse(f"max_copies must be a number of experts or None, not {shown(count)}")
        super().__init__(policy.max_copies)

    def start(self, profile: Array) -> None:
        self._asked("start", lambda: self._policy.start(_read_only(profile)))
        self._take_scores(profile.size)

    def observe(self, used: Array) -> None:
        self._asked("observe", lambda: self._policy.observe(_read_only(used)))
        self._take_scores(self.scores.size)

    def choose(self, candidates: Array, residents: Array, num_free: int) -> Changes:
        given = _read_only(candidates), _read_only(residents), num_free
        changes = self._asked("choose", lambda: self._policy.choose(*given))
        if not isinstance(changes, Changes):
            self._refuse(f"choose must return Changes, not {shown(changes)}")
        for name, chosen, allowed in (
            ("admitted", changes.admitted, candidates),
            ("evicted", changes.evicted, residents),
        ):
            if not (isinstance(chosen, np.ndarray) and np.issubdtype(chosen.dtype, np.integer)):
                self._refuse(f"choose must return {name} as an array of integers, not {shown(chosen)}")
            if np.unique(chosen).size != chosen.size or not np.isin(chosen, allowed).all():
                self._refuse(f"choose returned as {name} what it was not offered, or an expert twice")
        num_admitted, num_evicted = changes.admitted.size, changes.evicted.size
        if not num_evicted <= num_admitted <= num_free + num_evicted:
            self._refuse(
                f"choose lets {num_admitted} experts in for {num_evicted} others and {num_free} free slots"
            )
        return changes

    def _take_scores(self, count: int) -> None:
        scores = getattr(self._policy, "scores", None)
        if not (isinstance(scores, np.ndarray) and scores.dtype == np.float64 and scores.shape == (count,)):
            self._refuse(f"scores must be float64 [{count}], one of each expert, not {shown(scores)}")
        if np.isnan(scores).any():
            self._refuse("a score is not a number")
        self.scores = scores

    def _asked(self, method: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except Exception as error:
            raise ConfigError(
                f"policy {self._name}: {method} raised {type(error).__name__}: {error}"
            ) from error

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigError(f"policy {self._name}: {problem}")


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
