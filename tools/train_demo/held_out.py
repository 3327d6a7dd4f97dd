"""Scoring a token stream: which token is predicted in which window, the same for every engine.

Windows of `length` tokens overlap by half. Every token after the first counts once, with at least `length /
2` tokens before it except at the stream's start. Files follow each other, each after an end-of-text token, as
in training.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """Inputs `[start, end)` of the stream predict the token after each; those from index `first` on count."""

    start: int
    end: int
    first: int


def scoring_windows(num_tokens: int, length: int) -> Iterator[Window]:
    """The windows that score a stream of `num_tokens` tokens, in order."""
    first = 1
    for start in range(0, num_tokens, length // 2):
        if first >= num_tokens:
            return
        end = min(start + length, num_tokens - 1)
        yield Window(start, end, first)
        first = end + 1


def bits_per_byte(
    ids: np.ndarray,
    num_bytes: int,
    length: int,
    log_probabilities: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> float:
    """Bits per byte of the stream `ids` that stands for `num_bytes` bytes of text.

    `log_probabilities(inputs [L], targets [L])` gives the natural log probability of each target.
    """
    nats = 0.0
    for window in scoring_windows(len(ids), length):
        inputs, targets = ids[window.start : window.end], ids[window.start + 1 : window.end + 1]
        counted = window.first - window.start - 1
        nats -= float(log_probabilities(inputs, targets)[counted:].sum(dtype=np.float64))
    return nats / math.log(2) / num_bytes
