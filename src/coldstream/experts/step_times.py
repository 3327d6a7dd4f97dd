"""Where the time of a step goes, on a GPU that holds some of the experts only.

Pure: from sums of stamps (`kernels/experts/stamps.py`) to seconds by layer and part. A difference of two sums
is the sum of the differences, so that the parts of all layers add up to what passed from the first layer's
router to the end of the last layer's sum, to the nanosecond.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from coldstream.kernels.experts.stamps import SUMS

Array = np.ndarray[Any, Any]

STEPS, ROUTER_BEGINS, ROUTER_ENDS, COMBINE_BEGINS, ANSWERED, COMBINE_ENDS = range(len(SUMS))
PARTS = ("other", "router", "resident", "bus", "wait", "combine")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of `steps` steps by layer that may miss an expert, as the GPU's clock saw them.

    other: from the end of the layer before, so nothing of the first layer: attention or DeltaNet, and layers
    whose experts are all there; router: until all pairs are shared out; resident, bus: until the GPU has
    computed its own, as bus where any of the layer's pairs came over it; wait: until the CPU's answer is
    there as well; combine: the sum of experts and the norm behind it. Of steps of several rows, wait and
    combine are the first row's. bus_steps: steps in which pairs came over the bus; bus_pairs: how many.
    """

    steps: int
    other: tuple[float, ...]
    router: tuple[float, ...]
    resident: tuple[float, ...]
    bus: tuple[float, ...]
    wait: tuple[float, ...]
    combine: tuple[float, ...]
    bus_steps: tuple[int, ...]
    bus_pairs: tuple[int, ...]

    @classmethod
    def of(cls, sums: Array, bus_pairs: Array) -> Self:
        """From sums uint64 [layers, 2, SUMS] of steps without and with bus pairs, and uint64 [layers].

        Sums of different steps, as one that failed half-way leaves them, tell nothing: that is no steps.
        """
        steps = np.unique(sums[:, :, STEPS].sum(axis=1))
        if len(steps) > 1:
            return cls.of(np.zeros_like(sums), np.zeros_like(bus_pairs))
        spans = np.diff(sums[:, :, ROUTER_BEGINS:], axis=2)  # modulo 2^64, as the sums are
        router, experts, wait, combine = np.moveaxis(spans, 2, 0)
        whole = sums.sum(axis=1, dtype=np.uint64)
        other = np.zeros(len(sums), np.uint64)
        other[1:] = whole[1:, ROUTER_BEGINS] - whole[:-1, COMBINE_ENDS]
        return cls(
            steps=int(steps[0]) if len(steps) else 0,
            other=_seconds(other),
            router=_seconds(router.sum(axis=1)),
            resident=_seconds(experts[:, 0]),
            bus=_seconds(experts[:, 1]),
            wait=_seconds(wait.sum(axis=1)),
            combine=_seconds(combine.sum(axis=1)),
            bus_steps=tuple(sums[:, 1, STEPS].tolist()),
            bus_pairs=tuple(bus_pairs.tolist()),
        )

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of all layers together, by the names in `PARTS`."""
        return {part: float(sum(getattr(self, part))) for part in PARTS}

    @property
    def seconds(self) -> float:
        """From the first layer's router to the end of the last layer, of all steps together."""
        return sum(self.parts.values())


def describe_parts(parts: dict[str, float]) -> str:
    """Their shares, for people; "" if no time has passed."""
    whole = sum(parts.values())
    if whole <= 0:
        return ""
    return ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in parts.items())


def _seconds(nanoseconds: Array) -> tuple[float, ...]:
    """Of sums of differences, which may be a little below zero where two clocks of the device disagree."""
    values: Sequence[int] = nanoseconds.astype(np.uint64).view(np.int64).tolist()
    return tuple(value / 1e9 for value in values)
