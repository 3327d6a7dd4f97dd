"""Statistics of guesses at later layers' experts and of prefetched experts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PrefetchStatistics:
    """Since the model was opened, by layer that may miss an expert.

    guessed: guesses made; right: those that the layer's router then chose. fetched: experts copied
    completely; used: those of them that their step used; given_up: experts whose copy had not ended when
    their layer was shared out. wasted_bytes: of experts fetched and not used; given_up_bytes: full size of
    those given up, more than was copied of them.
    """

    guessed: tuple[int, ...]
    right: tuple[int, ...]
    fetched: tuple[int, ...]
    used: tuple[int, ...]
    given_up: tuple[int, ...]
    wasted_bytes: tuple[int, ...]
    given_up_bytes: tuple[int, ...]

    @classmethod
    def of(cls, guesses: "GuessCounter", tallies: Array, layer_bytes: Sequence[int]) -> Self:
        """tallies: int [layers, 3], fetched, used, given up; layer_bytes: of an expert, by layer."""
        fetched, used, given_up = tallies.astype(np.int64).T
        sizes = np.array(layer_bytes, np.int64)
        in_vain = ((fetched - used) * sizes, given_up * sizes)
        columns = (guesses.guessed, guesses.right, fetched, used, given_up, *in_vain)
        return cls(*(tuple(column.tolist()) for column in columns))

    @property
    def recall(self) -> float:
        """Share of uses that were guessed; a guess names as many experts as a router. 0 before the first."""
        return sum(self.right) / max(1, sum(self.guessed))


class GuessCounter:
    """Compares guesses with what routers chose. The first `distance` layers have no guesses."""

    def __init__(self, num_layers: int, distance: int) -> None:
        self._distance = distance
        self.guessed = np.zeros(num_layers, np.int64)
        self.right = np.zeros(num_layers, np.int64)

    def count(self, guessed: Array, used: Array) -> None:
        """Counts guesses of a step, int32 [layers, rows, K], and those that are right by `used`."""
        guessed, used = guessed[self._distance :], used[self._distance :]
        hits = (guessed[..., :, None] == used[..., None, :]).any(axis=-1)
        self.guessed[self._distance :] += guessed[0].size if len(guessed) else 0
        self.right[self._distance :] += hits.sum(axis=(1, 2))
