"""What a step costs by its number of rows, and how many rows of prompts it has therefore.

Learned from the steps that were taken: as many rows as keep to a target, or more where short steps would make
all wait longer. Rows are counted in ranges, each of which begins a third or a half later than the one before.
An estimate is the median of the last times of steps of the range. The first one is left out, as it may have
paid for what is made at the first use. Beside answers that decode it counts until there is another.

A range that was not measured for `_FORGOTTEN` steps counts as never measured. Ranges above the usual number
of decoding rows age by steps of such size alone, so that what prompts cost outlasts many decoded tokens. It
knows no clock; times are seconds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final

from coldstream.decoding.row_times import RecentMedian
from coldstream.engine.scheduler import QUANTUM

_FIRST_ROWS: Final = 16  # rows of prompts while nothing is known
_RANGES_BEYOND: Final = 3  # ranges beyond the measured ones that are tried: up to twice the rows
_RANGES_FAR: Final = 5  # the same where longer steps make all wait less: up to four times the rows
_FORGOTTEN: Final = 1024  # steps
_MAX_DECODE_ROWS: Final = 16  # larger steps usually have rows of prompts
# How much longer a step may get that misses the target by decoding alone, so that prompts advance too.
_SLOWDOWN: Final = 2.0
_ALONE: Final = 1 / 3  # lower bound of a pure-prefill step, as a share of the target
_LAST: Final = 1 / 6  # aim for a step with a prompt's last row, as a share of the target
_MAX_EXTRA_COST: Final = 0.15  # allowed for a row of a short step, as a share of a row's cost in a whole one
_MAX_EXTRA_COST_AT_TARGET: Final = 0.3  # the same for a step that takes the target; less for a shorter one
_LONGEST: Final = 20.0  # upper bound of a step in targets, where that makes all requests wait less
# Where experts are missing a short step reads others for each row, but a long one reads all of them once. So
# steps of fewer rows do not tell what long ones cost, and one is tried if prompts wait for many steps.
_SHORT_ROWS: Final = 256
_TRIED_TIMES: Final = 4
_CHEAPER: Final = 0.9  # cost of a row, from which on it may fall further with more of them
_LONG_WAIT: Final = 8  # steps
# Longer steps are taken if the total wait falls to this share of the wait with steps within the target.
_LESS: Final = 2 / 3


class StepCost:
    """The seconds of a step by its number of rows, up to `num_rows`."""

    def __init__(self, num_rows: int, stale: int = _FORGOTTEN) -> None:
        """stale: steps after which what a range took is not added to any more, but measured anew."""
        self._rows, self._stale = _ranges(num_rows), stale
        self._medians = [RecentMedian() for _ in self._rows]
        self._firsts: list[float | None] = [None] * len(self._rows)  # by range; None: there is none
        self._newest = [0] * len(self._rows)  # by range: `_now` at its last step
        self._num_steps = self._num_long_steps = 0

    def record(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` rows took so long."""
        self._num_steps += 1
        self._num_long_steps += num_rows > _MAX_DECODE_ROWS
        each = bisect_right(self._rows, num_rows) - 1
        now = self._now(self._rows[each])
        if now - self._newest[each] >= self._stale:
            self._medians[each], self._firsts[each] = RecentMedian(), None
        if self._firsts[each] is None:
            self._firsts[each] = seconds
        self._medians[each].add(seconds, now)
        self._newest[each] = now

    def most_prompt_rows(self, num_decoding: int, wanted: Sequence[int], target_s: float) -> int:
        """How many rows of prompts, at least one, a step with so many decoding rows has.

        wanted: rows that each prompt needs, of which there is at least one. As many rows as keep the step
        within the target; where decoding alone takes more than half of it, they may about double the step.
        Beyond what was measured, up to twice as many rows are tried if they keep to the target at the same
        cost of a row. The rows are more, and a step takes up to `_LONGEST` targets, if all that wait then
        wait much less: where any number of rows reads all missing experts, many short steps would read them
        again and again. Whether it is so is tried where that would take many short steps.
        """
        known = self._known_or_once()
        if not known:
            return _FIRST_ROWS
        allowed_s = max(target_s, _SLOWDOWN * _seconds(known, num_decoding))
        tried = max(max(known), num_decoding + _FIRST_ROWS)
        end = bisect_left(self._rows, tried)
        some, more = self._rows[: end + _RANGES_BEYOND], self._rows[: end + _RANGES_FAR]
        fitting = [rows for rows in some if _seconds(known, rows) <= allowed_s]
        rows = max(1, max(fitting, default=0) - num_decoding)
        most = min(sum(wanted), more[-1] - num_decoding)
        if most <= rows or len(known) < 2:
            return rows

        def wait_s(rows: int) -> float:
            """Of all, until the prompts are computed in steps of so many of their rows."""
            step_s = _expected_s(known, num_decoding + rows)
            beyond_s = step_s - _expected_s(known, num_decoding)
            return ceil(sum(wanted) / rows) * (num_decoding * beyond_s + len(wanted) * step_s)

        longer = [each - num_decoding for each in more if rows < each - num_decoding < most] + [most]
        longest_s = _LONGEST * target_s
        longer = [each for each in longer if _expected_s(known, num_decoding + each) <= longest_s]
        best = min(longer, key=wait_s, default=rows)
        if wait_s(best) <= _LESS * wait_s(rows):
            return best
        is_growing = _seconds(known, self._next_range(num_decoding + rows)) <= allowed_s
        return rows if is_growing else self._trial(known, num_decoding, rows, sum(wanted), longest_s)

    def _trial(
        self, known: Mapping[int, float], num_decoding: int, rows: int, wanted: int, longest_s: float
    ) -> int:
        """Rows of prompts in a step that shows what longer ones cost; `rows` if nothing is to be tried."""
        num_rows = num_decoding + rows
        if num_rows >= _SHORT_ROWS or wanted < _LONG_WAIT * rows:
            return rows
        # What was measured but once may have cost too much, and is tried again.
        most_known = max(self._known(), default=num_rows)
        row_s, row_of_most_s = (_seconds(known, each) / each for each in (num_rows, most_known))
        base = most_known if row_of_most_s < _CHEAPER * row_s else num_rows
        tried = [
            each
            for each in self._rows
            if most_known < each <= min(_TRIED_TIMES * base, num_decoding + wanted)
            and _expected_s(known, each) <= longest_s
        ]
        return max(tried, default=num_rows) - num_decoding

    def prompt_rows_together(self, num_last: int, wanted: Sequence[int], most: int, target_s: float) -> int:
        """How many rows several prompts have in a step while nothing decodes yet: `most`, or less or more.

        num_last: prompts whose last row is in the step. They wait for their first token, so the others get
        what keeps the step to a sixth of the target. Otherwise the shortest prompt is done, with some rows of
        the others, if that takes at most half as long as a whole step: they lose little.
        """
        known, most, whole = self._known(), min(most, sum(wanted)), min(sum(wanted), self._rows[-1])
        if not known or len(wanted) + num_last < 2:
            return most
        if num_last:
            fitting = [rows for rows in self._rows if _expected_s(known, rows) <= _LAST * target_s]
            return max(1, min(most, max(fitting, default=0) - num_last))
        shortest = min(wanted) + QUANTUM * (len(wanted) - 1)
        return shortest if _expected_s(known, shortest) <= _expected_s(known, whole) / 2 else most

    def prompt_rows_alone(self, target_s: float) -> int:
        """Rows of a step of prompts alone. They are few, so that a prompt that comes meanwhile waits little.
        But a row must not cost much more, nor the step get much shorter than the target. More is paid for a
        step that keeps to the target, the more the less it falls short of it.

        All, as long as it is not known what they cost; then fewer are tried, a range at a time. What seemed
        expensive is tried again once it is stale, because it may have been measured in a bad moment.
        """
        known, most_rows = self._known(), self._rows[-1]
        if most_rows not in known:
            return most_rows
        whole_s, best, again = known[most_rows] / most_rows, most_rows, 0
        for rows in reversed(self._rows[:-1]):
            seconds = _seconds(known, rows)
            if seconds < _ALONE * target_s:
                break
            if seconds <= (1 + _extra_cost(seconds / target_s)) * whole_s * rows:
                best, again = rows, 0
                if rows not in known:
                    break
            elif self._age(rows) >= self._stale:
                again = again or rows
        return again or best

    def _next_range(self, num_rows: int) -> int:
        """Where the range behind that of so many rows begins; that of all rows is the last."""
        return self._rows[min(bisect_right(self._rows, num_rows), len(self._rows) - 1)]

    def _known(self) -> dict[int, float]:
        """Medians by the first number of rows of their range, ascending."""
        medians = zip(self._rows, self._medians, strict=True)
        return {
            rows: median.value
            for rows, median in medians
            if median.value is not None and self._age(rows) < _FORGOTTEN
        }

    def _known_or_once(self) -> dict[int, float]:
        """The same, with the first time of a range that has no other."""
        known = self._known()
        for rows, first in zip(self._rows, self._firsts, strict=True):
            if first is not None and self._age(rows) < _FORGOTTEN:
                known.setdefault(rows, first)
        return dict(sorted(known.items()))

    def _age(self, rows: int) -> int:
        """Steps since the last one of the range that begins with so many rows."""
        return self._now(rows) - self._newest[self._rows.index(rows)]

    def _now(self, rows: int) -> int:
        """What the age of a range that begins with so many rows is counted in."""
        return self._num_long_steps if rows > _MAX_DECODE_ROWS else self._num_steps


def _extra_cost(of_target: float) -> float:
    """How much more a row may cost than one of a whole step, in a step that takes so much of the target.

    What is compared was measured at different times, so that a limit near what a size costs is met by chance.
    """
    return max(_MAX_EXTRA_COST, _MAX_EXTRA_COST_AT_TARGET * of_target) if of_target <= 1 else _MAX_EXTRA_COST


def _ranges(num_rows: int) -> Sequence[int]:
    """Where each range begins: 1, 2, 3, 4, 6, 8, 12, 16, 24, … num_rows."""
    powers = [2**power for power in range(num_rows.bit_length())]
    starts = {start for power in powers for start in (power, power + power // 2) if start < num_rows}
    return [*sorted(starts), num_rows]


def _seconds(known: Mapping[int, float], rows: int) -> float:
    """On a straight line between the nearest that are known; outside of these, in proportion to the rows."""
    fewer = [at for at in known if at <= rows]
    more = [at for at in known if at >= rows]
    if not (fewer and more):
        nearest = fewer[-1] if fewer else more[0]
        return known[nearest] * rows / nearest
    low, high = fewer[-1], more[0]
    share = 0.0 if low == high else (rows - low) / (high - low)
    return known[low] + share * (known[high] - known[low])


def _expected_s(known: Mapping[int, float], rows: int) -> float:
    """The same, but outside of what is known on the line through the nearest two, if that rises."""
    if len(known) < 2 or min(known) <= rows <= max(known):
        return _seconds(known, rows)
    first, second = list(known)[:2] if rows < min(known) else list(known)[-2:]
    slope = max(0.0, (known[second] - known[first]) / (second - first))
    nearest = first if rows < first else second
    return max(0.0, known[nearest] + slope * (rows - nearest))
