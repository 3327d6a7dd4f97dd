"""The rates of attention, states and rows on a CPU: what times say, and that this machine has some."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc, best_runs, mixer_rates
from coldstream.kernels.experts.cpu_rates import written_codes
from coldstream.kernels.mixer_rates import MixerRates, measure_mixer_rates

BYTES_S, PAIR_S, PROMPT_PAIR_S, STATE_S, VALUE_S = 1e-10, 1e-11, 2e-11, 3e-11, 4e-11
OP_S, CALL_S, ROW_S = 5e-6, 7e-6, 1e-8
CODES = written_codes(1, 2**24)
RATES = MixerRates(2e-6, 2e-5, 6e9, 6e10, 3e10, 1e10, 2e10)


class Machine:
    """A clock that operations advance by what their arrays ask for, and attention more behind nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.is_read, self.held_up = 0.0, False, False
        for name in ("attention", "gated_delta_net", "add", "linear"):
            monkeypatch.setattr(_csrc, name, getattr(self, name))
        monkeypatch.setattr(mixer_rates, "_products", self.products)
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(best_runs, "time", clock)
        monkeypatch.setattr(mixer_rates, "time", clock)

    def read_weights(self) -> None:
        self.is_read = True

    def attention(self, runtime: object, query: np.ndarray, *others: Any) -> None:
        k_cache, v_cache = others[4:6]
        rows, width = query.shape
        positions = k_cache.shape[1]
        if rows == 1:
            cached = (k_cache.nbytes + v_cache.nbytes) * BYTES_S if self.is_read else 0.0
            self.held_up = not self.held_up  # by another program, in each run but one
            self.now += (cached + width * positions * PAIR_S) * (1 + self.held_up)
        else:
            self.now += width * rows**2 / 2 * PROMPT_PAIR_S
        self.is_read = False

    def gated_delta_net(self, runtime: object, qkv: np.ndarray, *others: Any) -> None:
        state = others[11]
        self.now += len(qkv) * state.size * STATE_S

    def add(self, runtime: object, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
        self.now += out.size * VALUE_S

    def linear(self, *others: object) -> None:
        self.now += CALL_S

    def products(self, *others: object) -> Callable[[], list[float]]:
        """Pairs of products, one of them held up by another program in each run."""
        held_up = iter(range(100))

        def run() -> list[float]:
            times = [OP_S + rows * ROW_S for rows in (mixer_rates._SHORT, mixer_rates._LONG)] * 5
            times[next(held_up)] += 1.0
            return times

        return run


def test_rates_follow_from_the_times_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_mixer_rates(1, Machine(monkeypatch).read_weights, CODES)
    times = (OP_S, CALL_S, *(1 / each for each in (BYTES_S, PAIR_S, PROMPT_PAIR_S, STATE_S, VALUE_S)))
    assert tuple(vars(found).values()) == pytest.approx(times, rel=1e-6)


def test_times_that_do_not_tell_heads_from_bytes_give_rates_that_a_machine_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)

    def attention(*others: Any) -> None:
        machine.now += 1e-3

    monkeypatch.setattr(_csrc, "attention", attention)
    assert measure_mixer_rates(1, machine.read_weights, CODES).is_sane


def test_this_machine_is_measured() -> None:
    assert measure_mixer_rates(1, lambda: None, CODES).is_sane


def test_products_of_a_graph_are_of_all_codes_in_turn_short_and_long() -> None:
    """The last ones have less than a pair of them."""
    row_bytes = QuantType.Q8_0.row_bytes(2048)
    pair = (mixer_rates._SHORT + mixer_rates._LONG) * row_bytes
    run = mixer_rates._products(_csrc.Runtime(2), written_codes(1, 3 * pair - 1))
    assert len(run()) == len(run()) == 2 * 2
    assert all(seconds > 0 for seconds in run())


def test_products_that_do_not_tell_rows_from_what_is_fixed_leave_a_time() -> None:
    assert mixer_rates._fixed_seconds(lambda: [1e-6, 1e-3]) == 1e-8


def test_of_two_measurements_each_rate_is_the_better_one() -> None:
    other = MixerRates(3e-6, 1e-5, *(4e10,) * 5)
    expected = MixerRates(2e-6, 1e-5, 4e10, 6e10, 4e10, 4e10, 4e10)
    assert RATES.better(other) == other.better(RATES) == expected
    assert RATES.of_cores(3) == MixerRates(2e-6, 2e-5, 1.8e10, 1.8e11, 9e10, 3e10, 6e10)
