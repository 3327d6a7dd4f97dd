"""Where the time of a step goes, on a GPU that holds only some of the experts.

Pure: from sums of stamps (`kernels/experts/stamps.py`) to seconds by layer and part. A difference of sums is
the sum of differences, so that the parts of all layers add up to the nanosecond to the time from the first
layer's router to the end of the last layer's sum.
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
    """Seconds of `steps` steps, by the GPU's clock, for each layer that may miss an expert.

    other: since the end of the layer before (0 for the first): attention or DeltaNet, and whole layers;
    router: until all pairs are shared out; resident, bus: until the GPU has computed its pairs, counted as
    bus if any was read over it; wait: then until the CPU has answered; combine: the sum of experts and the
    norm after it. With several rows, wait and combine are the first row's. bus_steps: steps with pairs read
    over the bus; bus_pairs: the number of such pairs.
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
        """sums: uint64 [layers, 2, SUMS], of steps without and with bus pairs; bus_pairs: uint64 [layers].

        Zero steps if layers have different numbers of them, as after a step that failed half-way.
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
    """The parts' shares in percent, as text; "" if no time has passed."""
    whole = sum(parts.values())
    if whole <= 0:
        return ""
    return ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in parts.items())


def _seconds(nanoseconds: Array) -> tuple[float, ...]:
    """Sums of differences in seconds, which may be slightly negative as the device's clocks differ."""
    values: Sequence[int] = nanoseconds.astype(np.uint64).view(np.int64).tolist()
    return tuple(value / 1e9 for value in values)
