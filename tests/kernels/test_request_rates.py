"""Requests to the server of experts as a model's layers make them, and what they take."""

import itertools

import numpy as np
import pytest

from coldstream.errors import DeviceError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.experts import request_rates
from coldstream.kernels.experts.cpu_rates import random_weight
from coldstream.kernels.experts.request_rates import LAYERS_AHEAD, NUM_LAYERS, OF_GUESSES, ExpertRequests

EXPERTS, RANKS = 24, 8


def weights() -> list["_csrc.Weight"]:
    return [random_weight(QuantType.Q4_K, 256, 256, EXPERTS) for _ in range(3)]


def test_each_request_asks_for_experts_most_of_which_are_expected() -> None:
    with ExpertRequests.running(1, weights(), RANKS, 0.0) as requests:
        for number, _ in itertools.product((8, 2), range(4)):
            assert requests.window(number) > 0
        work, counts = requests._server.work(), requests._server.expected()
    expected, right, asked = np.sum(counts, axis=0)
    assert len(work) == NUM_LAYERS
    assert max(count for count, _, _ in work) - min(count for count, _, _ in work) <= 1
    assert asked == sum(pairs for _, pairs, _ in work)
    # Nobody expected the first ones, and threads that are late miss some words.
    assert 0.5 * asked <= expected <= asked - asked // OF_GUESSES + 2 * LAYERS_AHEAD * RANKS
    assert right <= expected


def test_experts_differ_from_request_to_request_until_all_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    with ExpertRequests.running(1, weights(), RANKS, 0.0) as requests:
        original = requests._ask

        def noted(number: int) -> None:
            original(number)
            asked.extend(requests._ids[0, :number].tolist())
            assert set(requests._ids[0, number:].tolist()) <= {-1}

        monkeypatch.setattr(requests, "_ask", noted)
        requests.window(3)
    for start in range(0, len(asked) - EXPERTS, EXPERTS):
        assert sorted(asked[start : start + EXPERTS]) == list(range(EXPERTS))


def test_a_window_lasts_until_what_runs_beside_it_is_over() -> None:
    answers = iter([False, False, True])
    with ExpertRequests.running(1, weights(), RANKS, 0.0) as requests:
        requests.window(2, lambda: next(answers))
        assert requests._count == 3


def test_the_best_window_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(request_rates.ExpertRequests, "window", lambda self, number: next(times))
    with ExpertRequests.running(1, weights(), RANKS, 0.0) as requests:
        assert requests.best_seconds(2) == 2.0


def test_threads_that_never_answer_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_rates, "_LIMIT_S", 0.0)
    requests = ExpertRequests(1, weights(), RANKS, 0.0)  # whose server does not look for requests
    with pytest.raises(DeviceError, match="do not answer"):
        requests.window(2)
