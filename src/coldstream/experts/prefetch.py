"""Whether experts are fetched before their layer's router has run, how many, and in how many bytes. Pure."""

from dataclasses import dataclass
from typing import Final, Self

MAX_PREFETCHED: Final = 8  # experts of a layer

# Copying an expert takes about as long as computing a layer: guessed one layer ahead, most arrive too late
# (docs/notes/prefetching.md).
LAYERS_AHEAD: Final = 2


@dataclass(frozen=True)
class Prefetching:
    """How many layers ahead experts are guessed, and how many of a layer are fetched at most.

    Places for them take no more than `cap_bytes`. Creation raises ValueError for numbers out of range.
    """

    distance: int
    experts: int
    cap_bytes: int | None = None  # None: all of the ring

    def __post_init__(self) -> None:
        if self.distance < 1 or not 1 <= self.experts <= MAX_PREFETCHED:
            raise ValueError(f"{self}: at least 1 layer ahead, and 1 to {MAX_PREFETCHED} experts")
        if self.cap_bytes is not None and self.cap_bytes < 0:
            raise ValueError(f"{self}: a cap below 0 bytes")

    @classmethod
    def planned(cls, distance: int, experts: int, cap_bytes: int) -> Self | None:
        """That of a plan with these numbers; None if it fetches no experts ahead."""
        return cls(distance, experts, cap_bytes) if experts else None

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
        return Prefetching(self.distance, experts, experts * least) if experts else None
