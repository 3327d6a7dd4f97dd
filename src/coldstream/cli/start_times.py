"""When each stage of a start began, counted from the start of the process. For `--verbose`."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coldstream.planning.device_choice import OpenProgress

_START_TICKS: Final = 21  # in /proc/PID/stat: when the process began, in clock ticks since the machine did


@dataclass
class _Stage:
    begin_s: float
    end_s: float  # when it was last heard of


class StartTimes:
    """Hears of the progress of a start, notes it and passes it on.

    Stages run beside each other: weights are loaded while kernels are compiled.
    """

    def __init__(self, show: OpenProgress, age_s: Callable[[], float] | None = None) -> None:
        """age_s: seconds since the start began; None: since that of this process."""
        self._show = show
        self._age_s = age_s or process_age_s
        self._stages = {"importing": _Stage(0.0, 0.0)}

    def update(self, what: str, done: int, total: int) -> None:
        """As `ProgressLine.update`, from any thread."""
        now = self._age_s()
        self._stages.setdefault(what, _Stage(now, now)).end_s = now
        self._show(what, done, total)

    def report(self) -> str:
        """A line for each stage, in the order of their beginnings, and one for now."""
        lines = ["seconds of the start:"]
        for what, stage in self._stages.items():
            until = f", last heard of at {stage.end_s:.2f}" if stage.end_s > stage.begin_s else ""
            lines.append(f"{stage.begin_s:6.2f}  {what}{until}")
        return "\n".join([*lines, f"{self._age_s():6.2f}  ready"])


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[_START_TICKS - 2]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
