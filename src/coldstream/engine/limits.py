"""How much an engine takes on at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coldstream.errors import ConfigError, QueueFullError, shown

MAX_RUNNING: Final = 64
MAX_WAITING: Final = 65536


@dataclass(frozen=True)
class EngineLimits:
    """Checked on creation: ConfigError names the setting and its range."""

    max_running: int = MAX_RUNNING  # sequences in a step, if the model has memory for as many
    max_waiting: int = 512  # answers in the queue; a request that has no room there raises QueueFullError
    max_waiting_of_owner: int | None = None  # queue limit for one owner; None: no limit of its own
    # A step with decoding rows takes as many rows of prompts as keep it within this time, by what steps took
    # so far. It takes more where all requests then wait much less. A step of prompts alone may be as short as
    # a third of this time, if its rows then cost little more each. Infinite: as many rows as a step takes.
    target_step_ms: float = 50.0

    def __post_init__(self) -> None:
        _check_integer("max_running", self.max_running, 1, MAX_RUNNING)
        _check_integer("max_waiting", self.max_waiting, 1, MAX_WAITING)
        if self.max_waiting_of_owner is not None:
            _check_integer("max_waiting_of_owner", self.max_waiting_of_owner, 1, self.max_waiting)
        target = self.target_step_ms
        is_number = isinstance(target, (int, float)) and not isinstance(target, bool)
        if not is_number or math.isnan(target) or target <= 0:
            raise ConfigError(f"target_step_ms must be a number above 0, not {shown(target)}")

    def check_room(self, owner: str, owners: Sequence[str]) -> None:
        """Raises QueueFullError if another request of this owner has no room beside those of `owners`."""
        own = self.max_waiting_of_owner
        if len(owners) >= self.max_waiting + self.max_running:
            raise QueueFullError(
                f"{self.max_waiting} requests wait already, which is the limit: try again later"
            )
        if own is not None and owners.count(owner) >= own + self.max_running:
            raise QueueFullError(
                f"{own} requests with this API key wait already, the limit of one: try again later"
            )


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {shown(value)}")
