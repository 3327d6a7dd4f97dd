"""Notices an engine process that lives and does nothing. Knows only how long it has been silent."""

import asyncio
from collections.abc import Callable
from typing import Final

_LOOKS: Final = 4  # within the limit
_MAX_PAUSE_S: Final = 5.0


async def until_hung(silence_s: Callable[[], float], limit_s: float) -> float:
    """Returns once the engine was silent for longer than `limit_s`, and for how long.

    silence_s: seconds since its last sign of life while it had work, otherwise 0. It has to exceed the limit
    at two looks in turn: an event loop that was held up itself reads what had come in between.
    """
    pause_s, is_suspect = min(limit_s / _LOOKS, _MAX_PAUSE_S), False
    while True:
        await asyncio.sleep(pause_s)
        silent = silence_s()
        if silent > limit_s and is_suspect:
            return silent
        is_suspect = silent > limit_s
