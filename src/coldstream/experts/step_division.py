"""How the missing experts of a prefill step are divided between the bus and the CPU, layer by layer. Pure.

Everything that is learnt of the bus, of the CPU and of both ways of a step meets here: shares of a layer,
copies ahead, and whether the CPU has a part in a step at all. Any division gives the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from coldstream.experts.cpu_part import CpuPart
from coldstream.experts.cpu_share import CpuShare, Lookahead, Share, bus_order
from coldstream.kernels.experts.split import MissTimes

Array = np.ndarray[Any, Any]

PROBED_EXPERTS: Final = 128  # copied without the CPU's part, which say what the bus brings
MOST_PROBED: Final = 4  # layers of a step, if they miss few experts
CHEAP: Final = 2.0  # times as long as with the CPU's part: a layer that takes less is tried at once
MOST_COST: Final = 0.01  # of the time, for layers that take more


@dataclass(frozen=True)
class Division:
    """The experts of a layer that are neither on the device nor on their way: the bus's and the CPU's.

    is_alone: whether the CPU has none, so that these copies say what the bus brings without it.
    """

    streamed: Sequence[int]
    on_cpu: Sequence[int]
    is_alone: bool


@dataclass(frozen=True)
class Request:
    """Of the CPU. of_experts: int [experts], rows of each. seconds: that it was at work before it."""

    of_experts: Array
    expert_bytes: int
    seconds: float


class _Probed:
    """What a step has had of layers without experts for the CPU."""

    def __init__(self) -> None:
        self._experts = self._layers = 0

    @property
    def is_enough(self) -> bool:
        return self._experts >= PROBED_EXPERTS or self._layers >= MOST_PROBED

    def add(self, experts: int) -> None:
        """A layer with so many experts on the bus."""
        self._experts += experts
        self._layers += 1


class StepDivision:
    """One step at a time: `start`, `divide` for each layer, `end`. Times are of any clock."""

    def __init__(self, most_rows: int) -> None:
        """most_rows: of a step in which the CPU has a part."""
        self._most_rows = most_rows
        self.share, self.lookahead, self._part = CpuShare(most_rows), Lookahead(), CpuPart()
        self.with_cpu = False  # whether the CPU has a part in the step
        self._rows = 0  # of the step
        self._begun: float | None = None  # of a step that is compared
        self._is_usual = False  # whether that step does nothing for the first time
        self._known: set[tuple[int, bool]] = set()  # rows of steps that have run, and whether with the CPU
        self._missed_bytes = 0  # of the step's experts without a slot
        self._asked: Request | None = None  # the last one
        self._probed = _Probed()
        self._credit = 0.0  # seconds that layers without the CPU's experts may cost, beside what is cheap

    def begin_with(self, times: MissTimes, expert_bytes: float) -> None:
        """Begins anew with forecasts of what the CPU takes for experts of so many bytes."""
        self.share = CpuShare(self._most_rows)
        self.share.begin_with(times, expert_bytes)

    def start(self, rows: int, now: float) -> None:
        """Call before a step of `rows` rows."""
        is_possible = rows <= self._most_rows
        self._rows = rows
        self.with_cpu = is_possible and self._part.choose(rows)
        self._begun = now if is_possible else None
        self._is_usual = (rows, self.with_cpu) in self._known  # rates and kernels are new to the first step
        self._missed_bytes = 0
        self._asked, self._probed = None, _Probed()
        self.share.bus.start_step()

    def note_recording(self) -> None:
        """Notes that the step takes longer than others, as its launches are recorded."""
        self._is_usual = False

    def divide(
        self, counts: Array, missing: Array, coming: Sequence[int], expert_bytes: int, bytes_coming: int
    ) -> Division:
        """Of a layer whose router has run.

        counts: int [experts], rows of each. missing: bool [experts], without a slot. coming: those that are
        copied already. bytes_coming: that the bus has begun and not ended.
        """
        self._missed_bytes += int(np.count_nonzero(missing & (counts > 0))) * expert_bytes
        left = missing.copy()
        left[list(coming)] = False
        order = bus_order(counts, left, self.with_cpu)
        if not self.with_cpu:
            return Division(order, [], is_alone=False)
        share = self.share.split(self._rows, counts[order], expert_bytes, bytes_coming)
        if order and self._is_probed(share):
            self._probed.add(len(order))
            return Division(order, [], is_alone=True)
        first = len(order) - share.on_cpu
        return Division(order[:first], order[first:], is_alone=False)

    def _is_probed(self, share: Share) -> bool:
        """Whether a layer is all the bus's, to see what that brings without the CPU's part.

        Not where it would take several times as long: then a step without the CPU is not worth a try.
        """
        if self.share.bus.knows_alone or self._probed.is_enough:
            return False
        extra = share.on_bus - CHEAP * share.seconds
        if extra > self._credit:
            return False
        self._credit -= max(0.0, extra)
        return True

    def asked(self, of_experts: Array, expert_bytes: int, cpu_seconds: float) -> None:
        """Takes note of a request to the CPU, and with it of what the one before took. See `Request`."""
        before, self._asked = self._asked, Request(of_experts, expert_bytes, cpu_seconds)
        if before is not None:
            self.share.learn_cpu(
                self._rows, before.of_experts, before.expert_bytes, cpu_seconds - before.seconds
            )

    def copied(self, num_bytes: int, seconds: float, *, is_alone: bool) -> None:
        """Takes note of a copy that is over. is_alone: as its `Division` had it."""
        self.share.bus.learn(num_bytes, seconds, is_alone=is_alone)

    def end(self, now: float) -> None:
        """Call when the step has ended."""
        rate = self.share.bus.end_step(with_cpu=self.with_cpu)
        if self._begun is None:
            return
        unknown = math.inf if self._missed_bytes else 0.0
        on_bus = self._missed_bytes / rate if rate else unknown
        seconds = now - self._begun
        if self.with_cpu and not self.share.bus.knows_alone:
            self._credit += MOST_COST * seconds
        self._part.learn(self._rows, seconds, on_bus, with_cpu=self.with_cpu, is_usual=self._is_usual)
        self._known.add((self._rows, self.with_cpu))
