"""RandomResidency: the policy for tests that residency must not change an answer."""

import numpy as np

from coldstream.placement.policies import Array, Policy


class RandomResidency(Policy):
    """Admits every miss in place of residents that a seeded generator picks at each step."""

    def __init__(self, seed: int, max_copies: int | None = None) -> None:
        super().__init__(max_copies)
        self._seed = seed

    def start(self, profile: Array) -> None:
        self._generator = np.random.default_rng(self._seed)
        self.scores = self._generator.random(profile.size)

    def observe(self, used: Array) -> None:
        self._generator.random(out=self.scores)

    def pays(self, candidates: Array, victims: Array) -> Array:
        return np.ones(candidates.size, bool)
