"""Notices an engine process that lives and does nothing, by how long it is silent and by what it has used."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coldstream.server.restarts import RestartPolicy

_LOOKS: Final = 4  # looks within the limit
_MAX_PAUSE_S: Final = 5.0
_LEAST_SHARE: Final = 0.01  # share of a processor's time that counts as computing


@dataclass(frozen=True)
class Work:
    """What a process has done since its start."""

    processor_s: float
    read_bytes: int  # from disks, also by way of mapped files


def work_of(pid: int) -> Work | None:
    """From /proc; None on systems without it, and for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ", 1) for line in lines)
    ticks = int(fields[11]) + int(fields[12])  # in user mode and in the kernel
    return Work(ticks / os.sysconf("SC_CLK_TCK"), int(counts["read_bytes"]))


class Stillness:
    """How long a process has neither computed nor read, as far as looks at it tell."""

    def __init__(self) -> None:
        self._last: tuple[float, Work] | None = None
        self._since: float | None = None

    def seconds(self, now: float, work: Work | None) -> float:
        """Up to `now`, of a process that has done `work`. 0 if that is not known."""
        if work is None:
            self._last = self._since = None
            return 0.0
        if self._last is None or _has_worked(*self._last, now, work):
            self._since = now
        self._last = now, work
        assert self._since is not None
        return now - self._since


def _has_worked(then: float, before: Work, now: float, work: Work) -> bool:
    share = (work.processor_s - before.processor_s) / max(now - then, 1e-9)
    return share >= _LEAST_SHARE or work.read_bytes > before.read_bytes


async def until_hung(
    silence_s: Callable[[], float],
    work: Callable[[], Work | None],
    policy: RestartPolicy,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Returns once the engine hangs, and how that shows: it was silent for longer than `policy.hang_s`, or
    stood still and was silent for longer than `policy.still_s`.

    silence_s: seconds since its last sign of life while it had work, otherwise 0. A limit has to be exceeded
    at two looks in turn: an event loop that was held up itself reads what had come in between.
    """
    pause_s, is_suspect = min(min(policy.hang_s, policy.still_s) / _LOOKS, _MAX_PAUSE_S), False
    stillness = Stillness()
    while True:
        await asyncio.sleep(pause_s)
        silent, still = silence_s(), stillness.seconds(clock(), work())
        is_still = min(silent, still) > policy.still_s
        is_hung = is_still or silent > policy.hang_s
        if is_hung and is_suspect:
            how = ", and neither computed nor read anything" if is_still else ""
            return f"it made no progress for {silent:.0f} s{how}"
        is_suspect = is_hung
