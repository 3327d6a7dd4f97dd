"""The rates at which cores multiply weights of each type: of all types, by the time of the best run."""

import numpy as np
import pytest

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc, best_runs
from coldstream.kernels.experts.cpu_rates import written_codes
from coldstream.kernels.linear.cpu_rates import PRODUCT_ROWS, RowProduct, measure_product_rates


def test_rates_are_weights_times_rows_by_the_time_of_the_best_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a run advances by a second for each row, and the first two runs of each by more."""
    now: list[float] = [0.0]
    calls: list[tuple[int, int]] = []

    def run(runtime: object, x: np.ndarray, weights: list[object], outs: list[np.ndarray]) -> None:
        call = id(weights[0]), len(x)
        now[0] += len(x) * {0: 9, 1: 3}.get(calls.count(call), 1)
        calls.append(call)
        assert outs[0].shape == (len(x), 3 * 256)

    monkeypatch.setattr(_csrc, "linear", run)
    monkeypatch.setattr(best_runs.time, "perf_counter", lambda: now[0])
    rates = measure_product_rates(3)
    assert len(rates) == len(QuantType)
    assert all(each == pytest.approx([3 * 256 * 2048] * len(PRODUCT_ROWS)) for each in rates)


def test_weights_in_ram_are_their_bytes_by_the_time_of_the_best_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = [0.0], iter([9.0, 3.0, 2.0, 2.0, 2.0])

    def run(runtime: object, x: np.ndarray, weights: list[object], outs: list[np.ndarray]) -> None:
        now[0] += next(taken)
        assert (x.shape, outs[0].shape) == ((1, 2048), (1, 1000))

    monkeypatch.setattr(_csrc, "linear", run)
    monkeypatch.setattr(best_runs.time, "perf_counter", lambda: now[0])
    row_bytes = QuantType.Q8_0.row_bytes(2048)
    assert RowProduct(2, np.empty(1000 * row_bytes + 1, np.uint8)).bytes_per_s() == 1000 * row_bytes / 2


def test_this_machine_is_measured() -> None:
    assert RowProduct(1, written_codes(1, 2**22)).bytes_per_s() > 1e6
    rates = measure_product_rates(1)
    assert [len(each) for each in rates] == [len(PRODUCT_ROWS)] * len(QuantType)
    assert all(rate > 1e6 for each in rates for rate in each)
