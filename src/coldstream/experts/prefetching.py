"""Whether experts are fetched before their layer's router has run, and how many. Pure."""

from dataclasses import dataclass
from typing import Final

MAX_PREFETCHED: Final = 8  # experts of a layer

# An expert takes about as long over the bus as a layer takes without it: one layer ahead, most come too late
# (docs/log.md).
LAYERS_AHEAD: Final = 2


@dataclass(frozen=True)
class Prefetching:
    """How many layers ahead experts are guessed, and how many of a layer are fetched at most."""

    distance: int
    experts: int

    def __post_init__(self) -> None:
        if self.distance < 1 or not 1 <= self.experts <= MAX_PREFETCHED:
            raise ValueError(f"{self}: at least 1 layer ahead, and 1 to {MAX_PREFETCHED} experts")

    def fitting(self, num_bytes: int, expert_bytes: int) -> "Prefetching | None":
        """As much of it as finds places in so many bytes; None if nothing does."""
        experts = min(self.experts, num_bytes // ((self.distance + 1) * max(1, expert_bytes)))
        return Prefetching(self.distance, experts) if experts else None
