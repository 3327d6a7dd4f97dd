"""Under what a machine was measured: the load of other programs, the spread of samples, the cores' clock.

A measurement that something disturbed is a starting point, and is taken again. Sources: /proc/stat,
/proc/loadavg and the files of cpufreq, of the CPUs that this process may run on. What a system does not show
is None, and disturbs nothing.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from coldstream.kernels.best_runs import FEWEST_RUNS

MOST_BUSY: Final = 0.1  # of the CPUs, by other programs; a desktop at rest takes a few hundredths
MOST_SPREAD: Final = 0.1  # between the three best samples
LEAST_CLOCK: Final = 0.5  # of the highest; all cores at work reach 0.6 to 0.9 of what one alone does
MOST_TRIES: Final = 4  # where something disturbs every measurement, the best of so many is kept
_MOST: Final = 1 << 20  # of CPUs, of their load, and of measurements in turn
_WINDOW_S: Final = 0.3  # a CPU's time is counted in hundredths of a second
_PROC, _CPUS = Path("proc"), Path("sys/devices/system/cpu")
_BUSY_FIELDS: Final = (0, 1, 2, 5, 6, 7)  # of a CPU's line: user, nice, system, irq, softirq, steal


@dataclass(frozen=True)
class Conditions:
    """Of a measurement. Plain values, so `dataclasses.asdict` gives JSON.

    other_cpus: of `num_cpus`, those that other programs kept busy, on average. load_average: of the minute
    before. spread: how much less the third best sample of memory was than the best. clock: of the cores, as
    a share of their highest. num_tries: measurements in turn that something disturbed, this one included.
    """

    num_cpus: int
    other_cpus: float | None = None
    load_average: float | None = None
    spread: float | None = None
    clock: float | None = None
    num_tries: int = 1

    @property
    def problems(self) -> tuple[str, ...]:
        """What disturbed the measurement, as text; empty if nothing did."""
        found = []
        if self.other_cpus is not None and self.other_cpus > MOST_BUSY * self.num_cpus:
            found.append(f"other programs took {self.other_cpus:.1f} of {self.num_cpus} CPUs")
        if self.spread is not None and self.spread > MOST_SPREAD:
            found.append(f"samples differed by {self.spread:.0%}")
        if self.clock is not None and self.clock < LEAST_CLOCK:
            found.append(f"cores ran at {self.clock:.0%} of their highest clock")
        return tuple(found)

    @property
    def is_due(self) -> bool:
        """Whether the machine is to be measured again in an idle moment."""
        return bool(self.problems) and self.num_tries < MOST_TRIES

    @classmethod
    def parsed(cls, document: object) -> Self | None:
        """Of the JSON object that `asdict` gave; None if it is none, or has absurd values."""
        names = {field.name for field in fields(cls)}
        if not isinstance(document, dict) or document.keys() != names:
            return None
        counts = [document[name] for name in ("num_cpus", "num_tries")]
        others = [document[name] for name in names - {"num_cpus", "num_tries"}]
        if not all(type(count) is int and 1 <= count <= _MOST for count in counts):
            return None
        return cls(**document) if all(map(_is_share, others)) else None


def _is_share(value: Any) -> bool:
    return value is None or (isinstance(value, float) and 0 <= value <= _MOST)


def spread_of(rates: Sequence[float]) -> float | None:
    """How much less the third best of `rates` is than the best; None with fewer."""
    best = sorted(rates)[-FEWEST_RUNS:]
    return 1 - best[0] / best[-1] if len(best) == FEWEST_RUNS and best[-1] > 0 else None


class LoadWatch:
    """What other programs do from its creation on."""

    def __init__(
        self,
        cpu_ids: Sequence[int],
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        own_seconds: Callable[[], float] | None = None,
    ) -> None:
        """cpu_ids: CPUs that this process may run on. own_seconds: its CPU time, in all threads, so far."""
        self._cpu_ids, self._root, self._clock = tuple(cpu_ids), root, clock
        self._own_seconds = own_seconds or _own_seconds
        self._load_average = _load_average(root)
        self._begun = self._now()

    def conditions(self, samples: Sequence[float] = ()) -> Conditions:
        """From its creation until now; samples: rates of the same thing, measured meanwhile."""
        return Conditions(
            num_cpus=max(1, len(self._cpu_ids)),
            other_cpus=self._other_cpus(),
            load_average=self._load_average,
            spread=spread_of(samples),
            clock=_clock_share(self._root, self._cpu_ids),
        )

    def were_alone(self) -> bool:
        """Whether other programs have left the CPUs alone since its creation."""
        other = self._other_cpus()
        return other is None or other <= MOST_BUSY * max(1, len(self._cpu_ids))

    def _now(self) -> tuple[float, float, float | None]:
        return self._clock(), self._own_seconds(), _busy_seconds(self._root, self._cpu_ids)

    def _other_cpus(self) -> float | None:
        (then, own_then, busy_then), (now, own, busy) = self._begun, self._now()
        if busy is None or busy_then is None or now <= then:
            return None
        return max(0.0, busy - busy_then - (own - own_then)) / (now - then)


def is_idle(cpu_ids: Sequence[int]) -> bool:
    """Whether other programs leave the CPUs alone, by a look of `_WINDOW_S` seconds."""
    watch = LoadWatch(cpu_ids)
    time.sleep(_WINDOW_S)
    return watch.were_alone()


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds(root: Path, cpu_ids: Sequence[int]) -> float | None:
    """CPU time that these CPUs spent at work, for all programs; None where the system does not say."""
    wanted = {f"cpu{cpu_id}" for cpu_id in cpu_ids}
    ticks, num_found = 0, 0
    for line in _lines(root / _PROC / "stat"):
        name, *columns = line.split()[:9] or [""]
        if name in wanted and len(columns) > max(_BUSY_FIELDS) and all(map(str.isdecimal, columns)):
            ticks += sum(int(columns[place]) for place in _BUSY_FIELDS)
            num_found += 1
    return ticks / os.sysconf("SC_CLK_TCK") if ticks and num_found == len(wanted) else None


def _load_average(root: Path) -> float | None:
    for line in _lines(root / _PROC / "loadavg"):
        first = line.partition(" ")[0]
        if first.replace(".", "", 1).isdecimal():
            return float(first)
    return None


def _clock_share(root: Path, cpu_ids: Sequence[int]) -> float | None:
    """The mean of what the CPUs run at, as a share of their highest clock; None where files do not say."""
    shares = []
    for cpu_id in cpu_ids:
        folder = root / _CPUS / f"cpu{cpu_id}/cpufreq"
        now, most = ("".join(_lines(folder / name)) for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
        if now.isdecimal() and most.isdecimal() and int(most):
            shares.append(int(now) / int(most))
    return sum(shares) / len(shares) if shares else None


def _lines(path: Path) -> list[str]:
    """Of a file of the kernel; none where there is no such file, or it may not be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
