"""How long the CPU takes for experts of several rows, by prompts whose experts the device shared out. Pure.

A plan's times are from cores that have nothing else to do, and may be of another hour. In a prompt they read
beside the bus. Steps of one row say nothing about experts of several.
"""

from typing import Any

import numpy as np

from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes
from coldstream.placement.control import Pace

Array = np.ndarray[Any, Any]


class PromptPaces:
    """Over a forecast, for experts of about as many rows."""

    def __init__(self, times: MissTimes) -> None:
        self._forecast = np.array((0, *times.cpu), np.float64)
        self._paces: dict[int, Pace] = {}  # by the bit length of an expert's rows

    def learn(self, pairs: Array, experts: Array, nanoseconds: Array) -> bool:
        """Takes note of a prompt's requests: pairs, experts and time of each layer, float64 [layers].

        Of the layers the median counts: a thread that loses its core holds up some of them. What is absurd is
        left out. Returns whether anything was learned.
        """
        usable = np.isfinite(nanoseconds) & (nanoseconds > 0) & (experts > 0) & (pairs >= experts)
        if not usable.any():
            return False
        experts, rows = experts[usable], pairs[usable] / experts[usable]
        ratio = float(np.median(nanoseconds[usable] / (experts * self._times(rows))))
        self._paces.setdefault(int(np.median(rows)).bit_length(), Pace()).learn(ratio)
        return True

    def _times(self, rows: Array) -> Array:
        """Forecast of an expert of so many rows, which need not be whole."""
        most = MAX_MAILBOX_ROWS
        known = np.interp(np.minimum(rows, most), np.arange(most + 1), self._forecast)
        return np.asarray(known * np.maximum(1.0, rows / most))

    def factors(self, of_one: float) -> list[float]:
        """How many times as long as forecast an expert of 1, 2, … MAX_MAILBOX_ROWS rows takes.

        of_one: of one row, which other steps say. What no prompt says of some rows is as of those nearest.
        """
        if not self._paces:
            return [of_one] * MAX_MAILBOX_ROWS
        lengths = (rows.bit_length() for rows in range(2, MAX_MAILBOX_ROWS + 1))
        nearest = (min(self._paces, key=lambda known: abs(known - length)) for length in lengths)
        return [of_one, *(self._paces[each].factor for each in nearest)]
