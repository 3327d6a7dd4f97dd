"""What ends the text of an answer: stop strings in streamed text, and one block of tokens over and over.

`StopMatcher` takes text in arbitrary pieces and lets through what can no longer be part of a stop string.
The division into pieces doesn't matter: the text let through is always the same.
"""

from collections.abc import Sequence

import numpy as np

from coldstream.decoding.constraints import RepetitionStop


class RepetitionWatch:
    """Watches the tokens of one answer for what `rule` describes. Memory and time per token are O(period)."""

    def __init__(self, rule: RepetitionStop) -> None:
        periods = np.arange(1, rule.max_period + 1)
        # So many tokens in a row equal the one a period before: the first block has nothing to equal.
        self._enough = np.maximum(rule.repeats * periods, rule.min_tokens) - periods
        # By period: how many tokens in a row agree so far.
        self._equal = np.zeros(rule.max_period, dtype=np.int64)
        self._last = np.full(rule.max_period, -1, dtype=np.int64)  # the latest token is first

    def push(self, token_id: int) -> bool:
        """Appends a token (≥ 0); whether the answer is to end with it."""
        self._equal = np.where(self._last == token_id, self._equal + 1, 0)
        self._last[1:] = self._last[:-1]
        self._last[0] = token_id
        return bool((self._equal >= self._enough).any())


class StopMatcher:
    """Finds the stop string that is complete first; of those that end together, the one that starts first.

    The unit of work is `feed`: a piece of text in, the text that is safe to show out. With `include` a stop
    string that was found is shown too.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._num_passed = 0  # leading characters of the held text in which no stop string may end
        self.matched: str | None = None  # the stop string that was found, or None so far

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Text that is now known to lie before any stop string. Empty once a stop string was found.

        Unless `may_end`, no stop string ends in `text`; one may begin there.
        """
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        if not may_end:
            self._num_passed = len(self._held)
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop, max(0, self._num_passed - len(stop) + 1))) >= 0
        ]
        kept = 0
        if found:
            after, end, self.matched = min(found)
            end = after if self._include else end
        else:
            kept = self._num_undecided()
            end = len(self._held) - kept
        safe, self._held = self._held[:end], (self._held[end:] if kept else "")
        self._num_passed = max(0, self._num_passed - end)
        return safe

    def flush(self) -> str:
        """The text still held back, when nothing more will come."""
        text, self._held = self._held, ""
        return text

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
