"""How the missing experts of a token are divided between the CPU and the bus, by what the last tokens took.

A plan's times are where a run begins. Every few steps of one row, what the CPU and the GPU have stamped says
how long an expert really took each of them, and the tables that routers read are written anew. Prompts say
what the CPU takes for experts of several rows. The number of the CPU's threads follows the same stamps. How
many guessed experts are copied ahead follows what part of the guesses was right. Any division and number
gives the same bits. Pure; `StampedShares` does the same on a device.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from coldstream.experts.bus_tilt import BusTilt
from coldstream.experts.copies_ahead import CopiesAhead
from coldstream.experts.cpu_threads import CpuThreads
from coldstream.experts.decode import DecodeExperts
from coldstream.experts.gpu_statistics import MissShareStatistics, StepSums
from coldstream.experts.prefetch import GuessCounter, Recall
from coldstream.experts.prompt_paces import PromptPaces
from coldstream.kernels.cuda.staged import ReadBack, StagedRing
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_RANKS
from coldstream.kernels.experts.split import BY_MISSES, MAX_NS, MissTimes
from coldstream.kernels.experts.stamps import parse_stamps
from coldstream.placement.control import Balance, Contradiction, Overhead, Work
from coldstream.placement.controls import Controls, Moves
from coldstream.placement.cost import GUESSED
from coldstream.placement.run_file import Observed

Array = np.ndarray[Any, Any]
CpuWork = Sequence[tuple[int, int, float]]  # requests, pairs and seconds, by layer

STEPS_OF_AN_UPDATE: Final = 4
NO_WORK: Final = Work(0, 0)


class Seen(NamedTuple):
    """What was stamped since the model was opened.

    cpu: float64 [3, layers], requests, pairs and seconds. sums, bus_pairs: see `StepTimes.of`. guesses: see
    `GuessCounter.missing`. misses: experts that had no slot.
    """

    cpu: Array
    sums: Array
    bus_pairs: Array
    guesses: tuple[int, int] = (0, 0)
    misses: int = 0


@dataclass
class _Totals:
    """Of all updates. Work is in experts and nanoseconds."""

    cpu: Work = NO_WORK
    bus: Work = NO_WORK
    steps: int = 0
    seconds: float = 0.0

    def add(self, cpu: Work, bus: Work, steps: int, seconds: float) -> None:
        """What is absurd is left out."""
        if cpu.is_usable:
            self.cpu = Work(self.cpu.units + cpu.units, self.cpu.seconds + cpu.seconds)
        if bus.is_usable:
            self.bus = Work(self.bus.units + bus.units, self.bus.seconds + bus.seconds)
        if seconds > 0:
            self.steps += steps
            self.seconds += seconds


class MissShares:
    """Times of a missing expert, and a number of threads, moved by what steps of one row took."""

    def __init__(
        self,
        times: MissTimes,
        most_threads: int,
        controls: Controls,
        ahead: CopiesAhead | None = None,
        num_ranks: int = MAX_RANKS,
    ) -> None:
        """times: forecast. most_threads: of the CPU, with which it begins. ahead: how many guessed experts
        are copied to the device; None: there are no places for them. num_ranks: experts of a token in a
        layer.
        """
        self._forecast, self._controls = times, controls
        self._threads, self._contradiction = CpuThreads(most_threads), Contradiction()
        self._bus_ns = times.row_bus or times.bus
        self._balance = Balance(times.cpu[0], self._bus_ns)
        self._before: Seen | None = None
        self._totals, self._overhead, self._tilt = _Totals(), Overhead(), BusTilt()
        self._num_updates = self._num_layers = 0
        self._ahead, self._recall, self._num_ranks = ahead, Recall(GUESSED), num_ranks
        self._prompts = PromptPaces(times)
        self._words = self._words_now()

    def begin(self, seen: Seen) -> None:
        """What comes after `seen` is of steps of one row."""
        self._before = seen

    @np.errstate(over="ignore", invalid="ignore")  # what is absurd is left out
    def learn(self, seen: Seen) -> bool:
        """Learns from STEPS_OF_AN_UPDATE steps of one row since `begin`, or since the last call.

        Returns whether the times have moved. Stamps that are not of so many steps, as after one that failed,
        are left out.
        """
        before, self._before = self._before, seen
        if before is None:
            return False
        if self._ahead is not None:
            guessed, right = (now - then for now, then in zip(seen.guesses, before.guesses, strict=True))
            self._recall.learn(guessed, right)
        has_moved = self._learn_times(before, seen)
        if has_moved or self._ahead is not None:
            words, self._words = self._words, self._words_now()
            has_moved = has_moved or self._words != words
        return has_moved

    def learn_prompt(self, work: Array, experts: Array) -> bool:
        """Learns from a prompt. work: its `Seen.cpu`; experts: that the CPU computed, float64 [layers].

        Returns whether the times have moved. They need no contradiction: few prompts say what it takes to see
        one.
        """
        if self._controls.shares is Moves.NEVER:
            return False
        requests, pairs, seconds = work
        overhead = self._overhead.units * self._forecast.cpu[0] * self._balance.factors[0]
        has_moved = self._prompts.learn(pairs, experts, 1e9 * seconds - overhead * requests)
        if has_moved:
            self._words = self._words_now()
        return has_moved

    def _words_now(self) -> tuple[int, ...]:
        if self._ahead is None:
            return self.times.words()
        return self.times.words(self._recall.share, self._ahead.count)

    def _learn_times(self, before: Seen, seen: Seen) -> bool:
        """Of `learn`."""
        steps = StepSums.of(seen.sums - before.sums, seen.bus_pairs - before.bus_pairs)
        self._num_layers = len(seen.sums)
        if steps.steps != STEPS_OF_AN_UPDATE:
            return False
        requests, pairs, seconds = seen.cpu - before.cpu
        cpu = Work(float(pairs.sum()), 1e9 * float(seconds.sum()), float(requests.sum()))
        bus = Work(steps.bus_pairs, 1e9 * steps.bus_s)
        self._totals.add(cpu, bus, steps.steps, steps.seconds)
        self._overhead.learn(requests, pairs, seconds)
        overhead = self._overhead.units
        is_ahead_trying = self._ahead is not None and self._ahead.is_trying
        if self._ahead is not None:
            self._learn_ahead(self._ahead, steps, (seen.misses - before.misses) / steps.steps)
        if not is_ahead_trying:  # copies ahead slow the CPU down
            self._contradiction.learn(cpu, bus, overhead)
        # Of several controllers that try something, only one does at a time.
        if self._is_moving(self._controls.threads) and not self._tilt.is_trying and not is_ahead_trying:
            self._threads.learn(cpu.whole(overhead), bus)
        if not self._is_moving(self._controls.shares):
            return False
        self._balance.learn(_typical(pairs + overhead * requests, 1e9 * seconds), bus)
        if not self._threads.is_trying and not is_ahead_trying and cpu.units + bus.units > 0:
            self._tilt.learn(steps.experts_s / (cpu.units + bus.units))
        self._num_updates += 1
        return True

    def _learn_ahead(self, ahead: CopiesAhead, steps: StepSums, misses: float) -> None:
        """misses: of a step."""
        step_s = steps.seconds / steps.steps
        missing_s = step_s - self._num_layers * self._forecast.layer / 1e9
        if misses <= 0 or step_s <= 0:
            return
        times, recall, of_layer = self.times, self._recall.share, misses / self._num_layers
        least, most = likely_misses(of_layer, self._num_ranks)
        useful = max(times.by_fetches(most, recall)[least:])
        forecast = times.by_most_fetches(min(round(of_layer), self._num_ranks), useful, recall)
        may_try = not self._threads.is_trying and not self._tilt.is_trying
        ahead.learn(missing_s / misses, missing_s / step_s, useful, may_try=may_try, forecast=forecast)

    def _is_moving(self, moves: Moves) -> bool:
        return moves is Moves.ALWAYS or (moves is Moves.IF_CONTRADICTED and self._contradiction.is_there)

    @property
    def observed(self) -> Observed:
        """Of all updates so far."""
        totals, forecast = self._totals, (self._forecast.cpu[0], self._bus_ns)
        cpu, bus = (
            work.seconds / work.units / ns if work.is_usable else None
            for work, ns in zip((totals.cpu, totals.bus), forecast, strict=True)
        )
        return Observed(totals.steps, totals.seconds, cpu, bus)

    @property
    def num_threads(self) -> int:
        """Of the CPU, for the next steps of one row."""
        return self._threads.count

    @property
    def copies_ahead(self) -> bool:
        """Whether guessed experts are copied to the device in the next steps of one row."""
        return self._ahead is not None and self._ahead.count > 0

    @property
    def times(self) -> MissTimes:
        """As the last steps were."""
        cpu, bus = self._balance.factors
        forecast = self._forecast
        request = self._overhead.units * forecast.cpu[0] * cpu if self._num_updates else 0
        return replace(
            forecast,
            answer=min(MAX_NS, round(forecast.answer + request)),
            cpu=tuple(_scaled(np.array(forecast.cpu), np.array(self._prompts.factors(cpu))).tolist()),
            bus=int(_scaled(forecast.bus, bus)),
            row_bus=int(_scaled(self._bus_ns, bus * self._tilt.factor)),
        )

    def words(self) -> tuple[Array, Array]:
        """`MissTimes.words` for all layers, and for the one that tries what the others may never do."""
        words = np.array(self._words, np.int32)
        tried, by_bus = words.copy(), np.arange(MAX_RANKS + 1, dtype=np.int32)
        by_cpu, by_the_bus = self._balance.probes
        most = np.maximum(by_bus - 1, 0) if by_cpu else by_bus
        least = np.minimum(by_bus, 1) if by_the_bus else np.zeros_like(by_bus)
        tried[BY_MISSES] = np.clip(tried[BY_MISSES], np.minimum(least, most), most)
        return words, tried

    def statistics(self, num_ranks: int) -> MissShareStatistics | None:
        """num_ranks: experts of a token. None as long as nothing moves."""
        is_moving = any(map(self._is_moving, (self._controls.shares, self._controls.threads)))
        if not is_moving and self._ahead is None:
            return None
        cpu, bus = self._balance.factors
        by_bus = self.times.by_misses(num_ranks)[1:]
        ahead = self._ahead.best if self._ahead else 0
        return MissShareStatistics(self._num_updates, cpu, bus, by_bus, self._threads.count, ahead)


def likely_misses(mean: float, num_ranks: int) -> tuple[int, int]:
    """How many of `num_ranks` experts most layers miss, from least to most, if they miss `mean` of them."""
    mean = min(mean, num_ranks)
    deviation = math.sqrt(mean * (1 - mean / num_ranks))
    least, most = math.floor(mean - 2 * deviation), math.ceil(mean + 2 * deviation)
    return max(0, least), min(num_ranks, most)


def _typical(units: Array, seconds: Array) -> Work:
    """All units, float64 [layers], and what they would have taken with each layer as fast as their median.

    A thread that loses its core takes some layers a hundred times as long. What is balanced are the others.
    """
    usable = np.isfinite(seconds) & (seconds > 0) & (units > 0)
    if not usable.any():
        return NO_WORK
    units = units[usable]
    return Work(float(units.sum()), float(units.sum() * np.median(seconds[usable] / units)))


def _scaled(nanoseconds: Any, factor: Any) -> Any:
    """Integers, of one time or of an array of them."""
    return np.clip(np.rint(nanoseconds * factor), 1, MAX_NS).astype(np.int64)


class StampsOfAStep(NamedTuple):
    """A copy of `DecodeExperts.stamps`. is_first: whether the step before had other rows."""

    stamps: Array
    is_first: bool


class PromptStep(NamedTuple):
    """What the CPU had done before a prompt. number: of the launch."""

    work: Array
    experts: Array
    number: int


class StampedShares:
    """Moves the times that routers of `decode` read. work, expected: what the CPU did, and what was asked of
    it, see `ExpertServer`.

    num_layers: that may miss an expert. guesses: counts those at missing experts, if there are any.
    `starting`, `launched` and `ended` are called for each step whose experts the device shares out, and
    `learn` behind the next launch.
    """

    def __init__(
        self,
        decode: DecodeExperts,
        shares: MissShares,
        work: Callable[[], CpuWork],
        expected: Callable[[], Sequence[tuple[int, int, int]]],
        num_layers: int,
        guesses: GuessCounter | None = None,
        misses: Callable[[], int] = lambda: 0,
    ) -> None:
        self._misses = misses
        self._work, self._num_layers, self._shares, self._guesses = work, num_layers, shares, guesses
        self._expected = expected
        self._before: PromptStep | None = None  # the next step, if it is a prompt
        self._num_launches = 0
        self._stamps = ReadBack(decode.stamps)
        self._tables = (StagedRing(decode.times), StagedRing(decode.tried_times))
        self._seen: deque[tuple[Seen, bool]] = deque()  # and whether it is the first
        self._num_steps: int | None = None  # of one row, since the last copy of stamps; None: there is none

    def starting(self, rows: int, *, is_alone: bool) -> None:
        """Right before the launch of a step. is_alone: whether no other one may be running."""
        self._before = None
        if rows > MAX_MAILBOX_ROWS and is_alone:
            self._before = PromptStep(*self._done(), self._num_launches + 1)

    def _done(self) -> tuple[Array, Array]:
        asked = np.array(self._expected(), np.float64)
        return np.array(self._work(), np.float64).T, asked[:, -1]

    def launched(self, rows: int) -> StampsOfAStep | PromptStep | None:
        """Right behind the launch of a step. What `ended` is to be given when it has ended, if anything."""
        self._num_launches += 1
        if rows != 1:
            self._num_steps = None
            return self._before
        is_first = self._num_steps is None
        self._num_steps = 0 if self._num_steps is None else self._num_steps + 1
        if not is_first and self._num_steps < STEPS_OF_AN_UPDATE:
            return None
        self._num_steps = 0
        return StampsOfAStep(self._stamps.copy(), is_first)

    def ended(self, step: StampsOfAStep | PromptStep) -> None:
        """The step has ended, and the copy of its stamps with it. `learn` takes in what was seen."""
        if isinstance(step, PromptStep):
            if step.number == self._num_launches:  # no other one since
                work, experts = self._done()
                if self._shares.learn_prompt(work - step.work, experts - step.experts):
                    self._write()
            return
        sums, bus_pairs = parse_stamps(step.stamps[: self._num_layers])
        work = np.array(self._work(), np.float64).T
        guesses = self._guesses.missing if self._guesses else (0, 0)
        seen = Seen(work, sums.copy(), bus_pairs.copy(), guesses, self._misses())
        self._seen.append((seen, step.is_first))

    def learn(self) -> None:
        """Takes in the steps that have ended, and queues the tables if times have moved.

        That takes the host a part of the time of a short step. So call it right behind a launch.
        """
        while self._seen:
            seen, is_first = self._seen.popleft()
            if is_first:
                self._shares.begin(seen)
            elif self._shares.learn(seen):
                self._write()

    @property
    def observed(self) -> Observed:
        """See `MissShares`."""
        return self._shares.observed

    @property
    def num_threads(self) -> int:
        """See `MissShares`."""
        return self._shares.num_threads

    @property
    def copies_ahead(self) -> bool:
        """See `MissShares`."""
        return self._shares.copies_ahead

    def statistics(self, num_ranks: int) -> MissShareStatistics | None:
        """See `MissShares`."""
        return self._shares.statistics(num_ranks)

    def _write(self) -> None:
        """Queues the tables. A running step may read some of both: any division is right."""
        for ring, words in zip(self._tables, self._shares.words(), strict=True):
            ring.next_on_host()[:] = words
            ring.copy(len(words))
