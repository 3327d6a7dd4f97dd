"""How agreement with llama.cpp is counted."""

import numpy as np
import pytest

from bench.peers.agreement import compared


def test_choices_are_counted_everywhere_and_where_they_are_clear() -> None:
    second = np.array([[0, 2, 1], [3, 0, 1], [0, 0.9, 1], [5, 1, 1]], np.float32)
    first = second + np.array([[1], [2], [3], [4]], np.float32)  # the same for all tokens: no distance
    first[2, 1] += 0.5
    row = compared(("ours", "theirs"), first, second, np.array([True, True, False, True]))
    assert (row["of"], row["and"]) == ("ours", "theirs")
    assert row["top1_agreement"] == 0.75
    assert row["clear_top1_agreement"] == 1
    assert row["logit_distance"] == pytest.approx(np.sqrt(np.var([0, 0.5, 0]) / 4))
