"""Notices that the last tokens of an answer are one block over and over."""

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
