"""When this machine is measured again beside a server that nobody asks.

A measurement that something disturbed is a beginning (`placement/conditions.py`), and another one takes
seconds of all cores. So it is a process of its own. A request ends it at once and waits for nothing. Knows no
engine. Unit of work: one measurement that goes through.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from coldstream.errors import out_of_resources
from coldstream.placement.conditions import LoadWatch
from coldstream.placement.hardware import affinity
from coldstream.server.idle_unload import Clock, until_idle

RATES_COMMAND: Final = (sys.executable, "-P", "-m", "coldstream.server.rates_process")
IDLE_S: Final = 60.0  # without a request, until others are looked at
LOOK_S: Final = 3.0  # at what other programs do
PAUSE_S: Final = 600.0  # after a look that found them busy, and after a measurement that they disturbed
DONE: Final = 0  # exit codes of the process: nothing is to be measured any more, and something still is
DUE: Final = 75

Outcome = Literal["measured", "failed"]
Look = Callable[[], Callable[[], bool]]  # begins one; its end says whether others left the CPUs alone


class Measurement(Protocol):
    """A running process that measures."""

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


Begin = Callable[[str], Awaitable[Measurement]]  # of the GPU too for the device cuda; may raise OSError


class IdleRates:
    """Measures in idle moments, for one event loop."""

    def __init__(self, begin: Begin, look: Look, clock: Clock) -> None:
        self._begin, self._look, self._clock = begin, look, clock
        self._running: Measurement | None = None
        self._is_wanted = False

    def give_up(self) -> None:
        """Ends what is measured now, as somebody asks. It begins anew in a later idle moment."""
        self._is_wanted = False
        if self._running is not None:
            _kill(self._running)

    async def run(self, device: str, idle_s: Callable[[], float]) -> Outcome:
        """Returns once nothing is to be measured any more, or it cannot be. idle_s: since the last request; 0
        while one runs.
        """
        while True:
            await until_idle(lambda: IDLE_S - idle_s(), self._clock)
            were_alone = self._look()
            await self._clock.sleep(LOOK_S)
            if idle_s() < IDLE_S:
                continue
            code = await self._measure(device) if were_alone() else DUE
            if code == DONE:
                return "measured"
            if code == DUE:
                await self._clock.sleep(PAUSE_S)
            elif self._is_wanted:  # it was not ended from here
                return "failed"

    async def _measure(self, device: str) -> int:
        """The process's exit code; that of a failure where it could not be started."""
        self._is_wanted = True
        try:
            running = await self._begin(device)
        except OSError as error:
            return 1 if out_of_resources(error) is None else DUE
        self._running = running
        try:
            if not self._is_wanted:  # somebody asked while it was started
                _kill(running)
            return await running.wait()
        finally:
            self._running = None
            _kill(running)


def _kill(running: Measurement) -> None:
    with suppress(ProcessLookupError):
        running.kill()


def look_at_others() -> Callable[[], bool]:
    """A `Look` at the CPUs that this process may run on."""
    return LoadWatch(affinity()).were_alone


async def begin_measuring(device: str) -> Measurement:
    """A process that measures the CPU, and the GPU if `device` is cuda. The kernel ends it with this one."""
    return await asyncio.create_subprocess_exec(
        *(*RATES_COMMAND, device, str(os.getpid())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        process_group=0,  # out of reach of a terminal's Ctrl-C
    )


@dataclass(frozen=True)
class RatesSettings:
    """How a server measures, and who hears of it. Tests pass processes of their own."""

    begin: Begin = begin_measuring
    look: Look = look_at_others
    on_end: Callable[[Outcome], None] | None = None
