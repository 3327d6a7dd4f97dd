"""When an engine that nobody asks is unloaded, and who waits until it is loaded again.

Knows no processes: `Supervisor` ends the engine's and starts the next one. Unit of work: one sleep.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from coldstream.engine.limits import EngineLimits
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError, DeadlineError, InvalidRequestError


@dataclass(frozen=True)
class Clock:
    """Times of idleness. Tests pass one that they set."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


REAL_CLOCK: Final = Clock()


async def until_idle(left_s: Callable[[], float], clock: Clock) -> None:
    """Returns once `left_s`, the seconds that are left until the engine counts as idle, is not above 0.

    The caller goes on before any other task of the loop runs, so that nothing begins in between.
    """
    while (left := left_s()) > 0:
        await clock.sleep(left)


class WakeQueue:
    """Requests that came while the engine sleeps, in order. For one event loop."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._waiting: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self._came = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, submission: Submission) -> None:
        """Until `wake`. Raises what `fail` was given, DeadlineError, QueueFullError, InvalidRequestError."""
        request_id, owner = submission.request_id, submission.owner
        if request_id in self._waiting:
            raise InvalidRequestError(f"request {request_id}: this id is in use")
        self._limits.check_room(owner, [each for each, _ in self._waiting.values()])
        future = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = owner, future
        self._came.set()
        left = None if submission.deadline is None else submission.deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                await future
        except TimeoutError:
            raise DeadlineError(
                f"request {request_id}: the model was not loaded again by its deadline: allow more time"
            ) from None
        finally:
            self._waiting.pop(request_id, None)  # it is there still if its reader has left

    async def wanted(self) -> None:
        """Returns once a request waits."""
        while not self._waiting:
            self._came.clear()
            await self._came.wait()

    def wake(self) -> None:
        """Let all that wait go on, in order."""
        self._settle(lambda future: future.set_result(None))

    def fail(self, error: ColdstreamError) -> None:
        """End all that wait with an error."""
        self._settle(lambda future: future.set_exception(error))

    def _settle(self, settle: Callable[[asyncio.Future[None]], None]) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():  # its request may have been cancelled in this turn of the loop
                settle(future)
