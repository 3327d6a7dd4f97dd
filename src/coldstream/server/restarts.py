"""When an engine that died is started again. Pure: deaths and tokens are passed in.

The first death is followed by a restart at once. Deaths without a token in between wait twice as long each
time, and after `max_deaths` of them the breaker opens: requests are refused for `cool_down_s`, then one start
is tried, and the next death opens the breaker again.
"""

from dataclasses import dataclass

from coldstream.errors import ConfigError


@dataclass(frozen=True)
class RestartPolicy:
    """Delays between a death and the next start, in seconds, and when a process that lives counts as dead."""

    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    max_deaths: int = 5  # deaths in a row without a token in between
    cool_down_s: float = 60.0
    # Without a sign of life while requests run, until the process is ended. No step takes that long, not even
    # one of a long prompt whose experts all come from a slow disk.
    hang_s: float = 600.0
    # The same for one that stands still: that neither computes nor reads, as it was stopped or waits forever.
    still_s: float = 60.0
    on_change: bool = False  # start again with the new file when the model's file has changed

    def __post_init__(self) -> None:
        for name in ("hang_s", "still_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")
        if not 0 <= self.first_delay_s <= self.max_delay_s or self.cool_down_s < 0 or self.max_deaths < 1:
            raise ConfigError(f"restarts need delays from 0 on and at least one death, not {self}")


@dataclass(frozen=True)
class Restart:
    """What follows a death."""

    delay_s: float
    is_broken: bool  # whether this is one death too many


class Restarts:
    """The deaths so far."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._in_a_row = 0
        self.total = 0

    def moved(self) -> None:
        """A token was computed: what dies now is not what died before."""
        self._in_a_row = 0

    def died(self) -> Restart:
        """Count a death; what to do about it."""
        policy = self._policy
        self.total += 1
        self._in_a_row += 1
        if self._in_a_row >= policy.max_deaths:
            return Restart(policy.cool_down_s, is_broken=True)
        doubled = policy.first_delay_s * 2.0 ** min(self._in_a_row - 1, 60)
        return Restart(min(policy.max_delay_s, doubled), is_broken=False)
