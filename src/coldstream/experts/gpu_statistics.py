"""Counts and times of the experts that a GPU does not hold. Pure.

Times are differences of summed stamps (`kernels/experts/stamps.py`). So the parts of all layers add up to the
nanosecond: to the time from the first layer's router to the end of the last layer's sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from coldstream.experts.prefetch import PrefetchStatistics
from coldstream.experts.slots.cache import Counters
from coldstream.kernels.experts.stamps import SUMS

Array = np.ndarray[Any, Any]

STEPS, ROUTER_BEGINS, ROUTER_ENDS, COMBINE_BEGINS, ANSWERED, COMBINE_ENDS = range(len(SUMS))
PARTS = ("other", "router", "resident", "bus", "wait", "combine")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of `steps` steps, by the GPU's clock, for each layer that may miss an expert.

    The parts of a layer follow each other:

    - other: attention or DeltaNet, and whole layers before it; 0 for the first layer
    - router: until all pairs are shared out
    - resident, bus: until the GPU has computed its pairs; bus if it read any over the bus
    - wait: until the CPU has answered
    - combine: the sum of experts and the norm after it

    With several rows, wait and combine are the first row's. bus_steps: steps with pairs read over the bus.
    bus_pairs: the number of such pairs.
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


@dataclass(frozen=True)
class ExpertTimes:
    """Seconds since the model was opened that go to experts outside fast memory; they only grow.

    layers: of `timed_steps` steps, by the GPU's clock, the parts of `StepTimes` in the order of `PARTS`. cpu:
    the CPU at work for a GPU, beside it. disk: waiting for the disk with nothing left to compute.
    copied_bytes: of slots; copies have no times of their own, as they go on beside steps.
    """

    timed_steps: int = 0
    layers: tuple[float, ...] = (0.0,) * len(PARTS)
    cpu: float = 0.0
    disk: float = 0.0
    copied_bytes: int = 0


class LayerTotals:
    """Sums of `StepTimes` that only grow, while those of the device begin again after a step that failed."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = (0.0,) * len(PARTS)
        self._seen_steps, self._seen = 0, self.seconds

    def add(self, times: StepTimes) -> None:
        """Takes note of what the device has summed by now. Call before its sums are set to 0, and after."""
        parts = tuple(times.parts.values())
        begins_again = times.steps < self._seen_steps
        seen_steps, seen = (0, (0.0,) * len(PARTS)) if begins_again else (self._seen_steps, self._seen)
        self.steps += times.steps - seen_steps
        grown = zip(self.seconds, parts, seen, strict=True)
        self.seconds = tuple(total + max(0.0, now - before) for total, now, before in grown)
        self._seen_steps, self._seen = times.steps, parts


class StepSums(NamedTuple):
    """What `StepTimes` has of all layers together. experts_s: until all pairs are computed, in the parts
    resident, bus and wait.
    """

    steps: int
    seconds: float
    experts_s: float
    bus_s: float
    bus_pairs: int

    @classmethod
    def of(cls, sums: Array, bus_pairs: Array) -> Self:
        """See `StepTimes.of`. Zero steps if layers have different numbers of them."""
        steps = sums[:, :, STEPS].sum(axis=1)
        if not len(steps) or (steps != steps[0]).any():
            return cls(0, 0.0, 0.0, 0.0, 0)
        whole = sums.sum(axis=1, dtype=np.uint64)
        spans = np.stack(
            (
                whole[-1:, COMBINE_ENDS] - whole[:1, ROUTER_BEGINS],
                (whole[:, ANSWERED] - whole[:, ROUTER_ENDS]).sum(keepdims=True),
                (sums[:, 1, COMBINE_BEGINS] - sums[:, 1, ROUTER_ENDS]).sum(keepdims=True),
            )
        )
        seconds, experts_s, bus_s = (spans.view(np.int64)[:, 0] / 1e9).tolist()
        return cls(int(steps[0]), seconds, experts_s, bus_s, int(bus_pairs.sum()))


@dataclass(frozen=True)
class MissShareStatistics:
    """How the missing experts of a token are divided now, by what the steps before took.

    updates: of the division. cpu_factor, bus_factor: how many times as long as the plan's times an expert
    takes. by_bus: of 1, 2, … missing experts of a token, those that the bus reads in place, if none is copied
    ahead. threads: of the CPU, which compute the others. ahead: experts of a layer that are copied ahead at
    most.
    """

    updates: int
    cpu_factor: float
    bus_factor: float
    by_bus: tuple[int, ...]
    threads: int
    ahead: int = 0


def describe_parts(parts: dict[str, float]) -> str:
    """The parts' shares in percent, as text; "" if no time has passed."""
    whole = sum(parts.values())
    if whole <= 0:
        return ""
    return ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in parts.items())


def describe_shares(shares: MissShareStatistics) -> str:
    """How the missing experts of a token are divided, as text."""
    by_bus = ", ".join(map(str, shares.by_bus))
    return (
        f"of 1, 2, … experts that a token misses {by_bus} come over the bus now, and {shares.threads} CPU "
        f"threads compute the others: in {shares.updates} updates an expert took the CPU "
        f"{shares.cpu_factor:.2f} times as long as planned and the bus {shares.bus_factor:.2f} times"
    )


def _seconds(nanoseconds: Array) -> tuple[float, ...]:
    """Sums of differences in seconds, which may be slightly negative as the device's clocks differ."""
    values: Sequence[int] = nanoseconds.astype(np.uint64).view(np.int64).tolist()
    return tuple(value / 1e9 for value in values)


@dataclass(frozen=True)
class GpuExpertStatistics:
    """Since the model was opened, by layer that may miss an expert.

    hits, misses: uses by decoded tokens. whole_steps: decode steps that missed no expert of the layer.
    copies, copied_bytes, evictions: of slots. cpu_pairs: (token, expert) pairs that the CPU computed for
    cpu_requests, in cpu_s seconds, beside the GPU. cpu_expected: experts that earlier layers guessed, so that
    the CPU read them ahead; cpu_right: those of them that it was asked for; cpu_asked: all that it was asked
    for, each once in a step. prompt_streamed: experts of prefill steps copied over the bus. prompt_unused:
    streamed experts that no token chose; their copy began before their router had run.
    prompt_on_cpu: experts of prefill steps that the CPU computed. step_times: of decoded tokens. prefetch:
    None if nothing is prefetched. shares: None if they stay as planned.
    """

    num_slots: int
    num_experts: int
    hits: tuple[int, ...]
    misses: tuple[int, ...]
    whole_steps: tuple[int, ...]
    copies: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    evictions: tuple[int, ...]
    cpu_requests: tuple[int, ...]
    cpu_pairs: tuple[int, ...]
    cpu_s: tuple[float, ...]
    cpu_expected: tuple[int, ...]
    cpu_right: tuple[int, ...]
    cpu_asked: tuple[int, ...]
    prompt_streamed: tuple[int, ...]
    prompt_unused: tuple[int, ...]
    prompt_on_cpu: tuple[int, ...]
    step_times: StepTimes
    prefetch: PrefetchStatistics | None = None
    shares: MissShareStatistics | None = None

    @classmethod
    def of(
        cls,
        num_slots: int,
        num_experts: int,
        counters: Counters,
        cpu_work: Sequence[tuple[int, int, float]],
        cpu_ahead: Sequence[tuple[int, int, int]],
        prompt_streamed: Array,
        prompt_unused: Array,
        prompt_on_cpu: Array,
        step_times: StepTimes,
        prefetch: PrefetchStatistics | None = None,
        shares: MissShareStatistics | None = None,
    ) -> Self:
        """cpu_work: (requests, pairs, seconds) by layer; cpu_ahead: (expected, right, asked) by layer; the
        arrays: int64 [layers].
        """
        return cls(
            num_slots=num_slots,
            num_experts=num_experts,
            hits=_plain(counters.hits),
            misses=_plain(counters.misses),
            whole_steps=_plain(counters.whole_steps),
            copies=_plain(counters.copies),
            copied_bytes=_plain(counters.copied_bytes),
            evictions=_plain(counters.evictions),
            cpu_requests=tuple(requests for requests, _, _ in cpu_work),
            cpu_pairs=tuple(pairs for _, pairs, _ in cpu_work),
            cpu_s=tuple(seconds for _, _, seconds in cpu_work),
            cpu_expected=tuple(expected for expected, _, _ in cpu_ahead),
            cpu_right=tuple(right for _, right, _ in cpu_ahead),
            cpu_asked=tuple(asked for _, _, asked in cpu_ahead),
            prompt_streamed=_plain(prompt_streamed),
            prompt_unused=_plain(prompt_unused),
            prompt_on_cpu=_plain(prompt_on_cpu),
            step_times=step_times,
            prefetch=prefetch,
            shares=shares,
        )

    @property
    def hit_rate(self) -> float:
        """Over all layers; 0 before the first decoded token."""
        return sum(self.hits) / max(1, sum(self.hits) + sum(self.misses))


def _plain(counts: Array) -> tuple[int, ...]:
    return tuple(int(count) for count in counts)
