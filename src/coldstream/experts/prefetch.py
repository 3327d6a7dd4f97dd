"""Which experts are fetched before their layer's router has run, and how many of them were used. Pure.

The device's part is in `prefetch_ring.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

Array = np.ndarray[Any, Any]


MAX_PREFETCHED: Final = 8  # experts of a layer

GUESSES_OF_EXPECTED: Final = 64  # the beginning of an average counts as so many
GUESSES_OF_AVERAGE: Final = 1024  # some tokens': earlier guesses count less and less

# Copying an expert takes about as long as computing a layer: guessed one layer ahead, most arrive too late
# (docs/notes/prefetching.md).
LAYERS_AHEAD: Final = 2


@dataclass(frozen=True)
class Prefetching:
    """How many layers ahead experts are guessed, and how many of a layer are fetched at most.

    Places for fetched experts take no more than `cap_bytes`. from_start: whether decoding begins with that,
    or without until steps show that it pays. Creation raises ValueError for numbers out of range.
    """

    distance: int
    experts: int
    cap_bytes: int | None = None  # None: all of the ring
    from_start: bool = True

    def __post_init__(self) -> None:
        if self.distance < 1 or not 1 <= self.experts <= MAX_PREFETCHED:
            raise ValueError(f"{self}: at least 1 layer ahead, and 1 to {MAX_PREFETCHED} experts")
        if self.cap_bytes is not None and self.cap_bytes < 0:
            raise ValueError(f"{self}: a cap below 0 bytes")

    @classmethod
    def planned(cls, distance: int, experts: int, cap_bytes: int, *, from_start: bool = True) -> Self | None:
        """The prefetching of a plan with these numbers. None if the plan fetches no experts."""
        return cls(distance, experts, cap_bytes, from_start) if experts else None

    @property
    def num_layers(self) -> int:
        """Layers that have places at the same time: `distance` that are prefetched, and the computed one."""
        return self.distance + 1

    def fitting(self, num_bytes: int, expert_bytes: int) -> "Prefetching | None":
        """The same with as many experts as have places in `num_bytes` and the present cap; None if none has.

        expert_bytes: of the largest expert, each matrix rounded up to the alignment of memory. The result's
        cap is the bytes of its places.
        """
        least = self.num_layers * max(1, expert_bytes)
        room = num_bytes if self.cap_bytes is None else min(num_bytes, self.cap_bytes)
        experts = min(self.experts, room // least)
        return replace(self, experts=experts, cap_bytes=experts * least) if experts else None


@dataclass(frozen=True)
class PrefetchStatistics:
    """Since the model was opened, by layer that may miss an expert.

    guessed: guesses made. right: guesses that the layer's router then chose. fetched: experts copied
    completely. used: fetched experts that their step used. given_up: experts whose copy had not ended when
    their layer was shared out. wasted_bytes: of experts fetched and not used. given_up_bytes: the full size
    of experts given up, which is more than was copied.
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
        """Share of uses that were guessed. A guess names as many experts as a router. 0 before the first."""
        return sum(self.right) / max(1, sum(self.guessed))


class GuessCounter:
    """Compares guesses with what routers chose. The first `distance` layers have no guesses.

    missing: of the guesses without a slot, the likeliest ones, as many as have places, and those of them that
    were right.
    """

    def __init__(self, num_layers: int, distance: int, num_places: int = MAX_PREFETCHED) -> None:
        """num_places: of a layer, for experts that are copied ahead."""
        self._distance, self._num_places = distance, num_places
        self.guessed = np.zeros(num_layers, np.int64)
        self.right = np.zeros(num_layers, np.int64)
        self.missing = (0, 0)

    def count(self, guessed: Array, used: Array, resident: Array | None = None) -> None:
        """Counts guesses of a step, int32 [layers, rows, K], and those that are right by `used`.

        resident: bool [layers that may miss an expert, experts]; None: none is counted as missing.
        """
        guessed, used = guessed[self._distance :], used[self._distance :]
        hits = (guessed[..., :, None] == used[..., None, :]).any(axis=-1)
        self.guessed[self._distance :] += guessed[0].size if len(guessed) else 0
        self.right[self._distance :] += hits.sum(axis=(1, 2))
        if resident is None:
            return
        has_slot = resident[self._distance :]
        guessed, hits = guessed[: len(has_slot)], hits[: len(has_slot)]
        first = np.arange(0, has_slot.size, resident.shape[1])[:, None, None]  # of each layer's experts
        missing = ~has_slot.reshape(-1).take(guessed + first, mode="clip")
        missing &= missing.cumsum(axis=-1) <= self._num_places
        num_missing, num_right = int(np.count_nonzero(missing)), int(np.count_nonzero(missing & hits))
        self.missing = self.missing[0] + num_missing, self.missing[1] + num_right


class Recall:
    """What part of the guesses at missing experts has been right lately. Begins with what is expected."""

    def __init__(self, expected: float) -> None:
        self._guessed, self._right = float(GUESSES_OF_EXPECTED), expected * GUESSES_OF_EXPECTED

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self._right / self._guessed

    def learn(self, guessed: int, right: int) -> None:
        """Takes note of new guesses, and of those that were right. What is absurd is left out."""
        if not (guessed > 0 and 0 <= right <= guessed):
            return
        kept = max(0.0, 1.0 - guessed / GUESSES_OF_AVERAGE)
        self._guessed, self._right = kept * self._guessed + guessed, kept * self._right + right
