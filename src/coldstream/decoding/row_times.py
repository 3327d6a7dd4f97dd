"""What a step costs by its number of rows, learned from the steps that were taken.

Rows are counted one by one up to 8, beyond that in ranges. A range is about as wide as what changes the cost
of a step, and there are few enough to measure all.

An estimate is a median of the last measurements, in which one loses half its weight with every 256 steps. So
a slow step changes nothing where steps are frequent, and where they are rare the new ones outweigh the stale.
A range without any for 16,384 steps counts as never measured. The first measurement of a range is left out:
it may have paid for what is made at the first use.

It knows no clock and no device. Times are seconds.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

MAX_ROWS: Final = 64
# The last number of rows of each range.
_LAST_ROWS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, MAX_ROWS)
_HALF_LIFE: Final = 256.0  # in steps
_FORGOTTEN: Final = 16384  # steps
_NUM_KEPT: Final = 9
# Share of the weight below a median; less than half, so that the median of two is the lower.
_MEDIAN: Final = 0.45
_ROW_SHARE: Final = 0.3  # cost of a further row until it is measured, as a share of a step of one row


class RecentMedian:
    """The median of the last 9 of many values but the first, newer ones weighing more.

    Of two it is the lower, as what disturbs a step makes it slower. It is computed when it is asked for, as
    that is rare beside values of steps without drafts.
    """

    def __init__(self) -> None:
        # Pairs of a step's number and a value.
        self._recent: deque[tuple[int, float]] = deque(maxlen=_NUM_KEPT)
        self._is_first = True
        self._median: float | None = None  # None: not computed since the last value

    @property
    def has_value(self) -> bool:
        """Whether there are values."""
        return bool(self._recent)

    @property
    def value(self) -> float | None:
        """The median; None without values."""
        if self._median is None and self._recent:
            self._median = self._compute()
        return self._median

    def add(self, value: float, step: int) -> None:
        """A value of a step, which is not before those of the values added before."""
        if self._is_first:
            self._is_first = False
            return
        self._recent.append((step, value))
        self._median = None

    def _compute(self) -> float:
        newest, _ = self._recent[-1]
        weighted = sorted((value, 0.5 ** ((newest - at) / _HALF_LIFE)) for at, value in self._recent)
        wanted = _MEDIAN * sum(weight for _, weight in weighted)
        sums = accumulate(weight for _, weight in weighted)
        return next(value for (value, _), total in zip(weighted, sums, strict=True) if total >= wanted)


class RowTimes:
    """The seconds of a step by its number of rows, from 1 to `MAX_ROWS`."""

    def __init__(self) -> None:
        self._medians = [RecentMedian() for _ in _LAST_ROWS]
        self._newest = [0] * len(_LAST_ROWS)  # the last step of each range that was not left out
        self._num_steps = 0
        self._estimates: list[float] = []  # empty: not computed since the last step

    def record(self, num_rows: int, seconds: float, num_steps: int = 1) -> None:
        """Steps of `num_rows` rows took so long together; they count as one measurement."""
        assert seconds > 0, "a step takes time"
        self._num_steps += num_steps
        each = row_range(num_rows)
        self._medians[each].add(seconds / num_steps, self._num_steps)
        if self._medians[each].has_value:
            self._newest[each] = self._num_steps
        self._estimates = []

    def skip(self, num_steps: int = 1) -> None:
        """So many steps went by whose time says nothing."""
        self._num_steps += num_steps

    @property
    def has_any(self) -> bool:
        """Whether anything is known."""
        return any(self._newest)

    def age(self, num_rows: int) -> int:
        """How many steps ago a step with about as many rows was measured; all steps if none was."""
        return self._num_steps - self._newest[row_range(num_rows)]

    def seconds(self, num_rows: int) -> float | None:
        """The estimate for a step of `num_rows`; None before anything is known.

        Numbers of rows that were not measured lie on a straight line between the nearest measured ones.
        Beyond all of these they lie on the line through the fewest and the most rows. They never take less
        time than fewer rows that were measured. Below all measured, and if there is only one, each row after
        the first is taken to cost 0.3 of a step of one row.
        """
        if not self._estimates and self.has_any:
            known = self._known(_FORGOTTEN) or self._known(self._num_steps)
            self._estimates = [_estimate(known, rows) for rows in _LAST_ROWS]
        return self._estimates[row_range(num_rows)] if self._estimates else None

    def _known(self, most_steps: int) -> dict[int, float]:
        """The medians by the most rows of their range, of ranges measured so many steps ago at most."""
        medians = zip(_LAST_ROWS, self._medians, self._newest, strict=True)
        return {
            rows: median.value
            for rows, median, newest in medians
            if self._num_steps - newest < most_steps and median.value is not None
        }


def row_range(num_rows: int) -> int:
    """The number of the range that a number of rows belongs to."""
    assert 1 <= num_rows <= MAX_ROWS, f"a step with a draft has 1 to {MAX_ROWS} rows, not {num_rows}"
    return bisect_left(_LAST_ROWS, num_rows)


def last_rows(num_rows: int) -> int:
    """The most rows of the range that a number of rows belongs to."""
    return _LAST_ROWS[row_range(num_rows)]


def _estimate(known: Mapping[int, float], rows: int) -> float:
    """See `RowTimes.seconds`. known: the measured seconds by rows, ascending; not empty."""
    if rows in known:
        return known[rows]
    fewer = [at for at in known if at < rows]
    more = [at for at in known if at > rows]
    if not fewer:
        return known[more[0]] * _assumed_cost(rows) / _assumed_cost(more[0])
    base = fewer[-1]
    if more:
        per_row = (known[more[0]] - known[base]) / (more[0] - base)
    elif len(fewer) > 1:
        per_row = (known[base] - known[fewer[0]]) / (base - fewer[0])
    else:
        per_row = known[base] * _ROW_SHARE / _assumed_cost(base)
    least = max(known[at] for at in fewer)
    return max(least, known[base] + per_row * (rows - base))


def _assumed_cost(rows: int) -> float:
    """Of a step, in steps of one row."""
    return 1.0 + _ROW_SHARE * (rows - 1)
