"""Who takes part in the next step, and with how many rows. A state machine over numbers: it knows neither
models nor memory nor clocks.

Answers wait until they are admitted, run until they are removed, and wait again if their memory is taken. The
order of arrival counts, a step of priority like `_STEPS_PER_PRIORITY` steps of it, so that nobody waits
forever. Among owners the one with the fewest running answers is next. Of those that run, memory is taken
from the last in the order, so that the first one always gets on.

Each step has a row of every answer that decodes. Of the other rows each prompt gets some, and the shortest as
many as it wants, so that it waits little for long ones. If there are too many prompts for that, those that
were served longest ago are next.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

MostRows = Callable[[int, Sequence[int]], int]

QUANTUM: Final = 32  # minimum prefill chunk, unless a prompt wants or may have less
_STEPS_PER_PRIORITY: Final = 256


@dataclass(eq=False)
class _Entry:
    """An answer."""

    key: int
    rank: tuple[int, int]  # sort key; no two are equal
    owner: str
    last_served: int = -1  # number of the step


class Scheduler:
    """Answers by their keys, which are ascending in order of arrival."""

    def __init__(self, max_running: int, num_rows: int) -> None:
        """max_running: answers at once. num_rows: of a step."""
        self._max_running = max_running
        self._num_rows = num_rows
        self._waiting: dict[int, _Entry] = {}
        self._running: dict[int, _Entry] = {}
        self._order: list[int] | None = None  # of those that run; None: they have changed
        self._num_steps = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> Sequence[int]:
        """Those that are admitted, the first in the order first."""
        if self._order is None:
            entries = sorted(self._running.values(), key=lambda entry: entry.rank)
            self._order = [entry.key for entry in entries]
        return self._order

    def add(self, key: int, *, priority: int = 0, owner: str = "") -> None:
        """A new answer waits."""
        rank = (self._num_steps - priority * _STEPS_PER_PRIORITY, key)
        self._waiting[key] = _Entry(key, rank, owner)

    def remove(self, key: int) -> None:
        """Forgets an answer, in whichever state it is."""
        self._waiting.pop(key, None)
        self._running.pop(key, None)
        self._order = None

    def candidate(
        self,
        is_ready: Callable[[int], bool] = lambda key: True,
        is_late: Callable[[int], bool] = lambda key: False,
    ) -> int | None:
        """The answer to admit next, if there may be another one.

        Only ready ones are looked at. Of those of an owner the late ones come last.
        """
        if len(self._running) >= self._max_running:
            return None
        ready = [entry for entry in self._waiting.values() if is_ready(entry.key)]
        if not ready:
            return None
        num_running = Counter(entry.owner for entry in self._running.values())
        return min(ready, key=lambda entry: (num_running[entry.owner], is_late(entry.key), entry.rank)).key

    def admit(self, key: int) -> None:
        """A waiting answer has memory from now on."""
        self._running[key] = self._waiting.pop(key)
        self._order = None

    def preempt(self) -> int | None:
        """The last of the running answers waits again; None, and nothing changes, if it is the only one."""
        if len(self._running) < 2:
            return None
        last = max(self._running.values(), key=lambda entry: entry.rank)
        self._waiting[last.key] = self._running.pop(last.key)
        self._order = None
        return last.key

    def share(self, wanted: Mapping[int, int], most_prompt_rows: MostRows) -> dict[int, int]:
        """Rows of each running answer in the next step, at least one each for those that take part.

        wanted: rows that each could use, ≥ 1; 1: it decodes. most_prompt_rows: of all prompts in a step with
        so many decoding rows, or none, and prompts that want so many; at least one gets a row anyway.
        """
        entries = sorted(self._running.values(), key=lambda entry: (entry.last_served, entry.rank))
        prompts = [entry for entry in entries if wanted[entry.key] > 1]
        kept_free = min(QUANTUM, self._num_rows // 2) if prompts else 0
        decoding = [entry for entry in entries if wanted[entry.key] == 1]
        decoding = decoding[: max(1, self._num_rows - kept_free)]
        shares = {entry.key: 1 for entry in decoding}
        left = self._num_rows - len(decoding)
        if prompts:
            rows_of_each = [wanted[entry.key] for entry in prompts]
            left = min(left, max(1, most_prompt_rows(len(decoding), rows_of_each)))
        least = accumulate(min(wanted[entry.key], QUANTUM) for entry in prompts)
        served = prompts[: max(min(left, 1), sum(rows <= left for rows in least))]
        rows = _shortest_first([wanted[entry.key] for entry in served], left)
        shares |= {entry.key: count for entry, count in zip(served, rows, strict=True)}
        return shares

    def served(self, keys: Collection[int]) -> None:
        """A step with rows of these answers is taken."""
        for key in keys:
            if key in self._running:
                self._running[key].last_served = self._num_steps
        self._num_steps += 1


def _shortest_first(wanted: Sequence[int], num_rows: int) -> list[int]:
    """Shares out rows: up to `QUANTUM` to each, the others to those that want the fewest.

    num_rows: enough for the first part, unless there is but one.
    """
    shares = [min(rows, QUANTUM, num_rows) for rows in wanted]
    left = num_rows - sum(shares)
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        more = min(wanted[i] - shares[i], left)
        shares[i] += more
        left -= more
    return shares
