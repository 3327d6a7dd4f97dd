"""The rates at which cores multiply experts: measured of experts that have exactly the rows they should."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc, best_runs
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.experts.cpu_rates import (
    experts_of_rows,
    measure_expert_rates,
    random_codes,
    written_codes,
)
from coldstream.kernels.experts.shapes import EXPERT_ROWS
from coldstream.kernels.quant_tensor import QuantTensor

EXPERT_BYTES = 3 * 512 * 2048 * 144 // 256


@given(st.integers(1, 16), st.integers(1, 70))
def test_every_expert_has_as_many_rows_and_no_token_chooses_one_twice(eights: int, rows: int) -> None:
    num_experts = 8 * eights
    ids = experts_of_rows(num_experts, rows)
    assert ids.dtype == np.int32
    assert (np.bincount(ids.reshape(-1), minlength=num_experts) == rows).all()
    assert all(len(set(token)) == 8 for token in ids.tolist())


def test_rates_are_bytes_of_experts_by_the_time_of_the_best_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a run advances by a second for each of its pairs, but the first run of each by more."""
    now, requests = [0.0], []

    def run(runtime: object, x: np.ndarray, ids: np.ndarray, *weights: object) -> None:
        is_first = not requests or requests[-1] != ids.size
        requests.append(ids.size)
        now[0] += ids.size * (9 if is_first else 1)
        assert x.shape == (len(ids), 2048)

    monkeypatch.setattr(_csrc, "routed_experts", run)
    monkeypatch.setattr(best_runs.time, "perf_counter", lambda: now[0])
    rates = measure_expert_rates(1, np.empty(40 * EXPERT_BYTES + 1, np.uint8))
    assert rates == pytest.approx([EXPERT_BYTES / rows for rows in EXPERT_ROWS])
    assert max(requests) <= 40 * 8 + 16 * 64, "fewer experts where each has more rows"
    assert requests[0] == 40, "as many as there is memory for"


def test_this_machine_is_measured() -> None:
    rates = measure_expert_rates(1, written_codes(1, 16 * EXPERT_BYTES))
    assert len(rates) == len(EXPERT_ROWS)
    assert all(rate > 1e6 for rate in rates)


@pytest.mark.parametrize("quant_type", QuantType, ids=lambda kind: kind.name)
def test_no_weight_that_rates_are_measured_with_is_near_an_end_of_float32(quant_type: QuantType) -> None:
    """With subnormal products a type was measured at half of its rate on Intel's processors."""
    shape = (64, 1024)
    blocks = torch.from_numpy(random_codes(quant_type, shape[0] * quant_type.row_bytes(shape[1])))
    magnitudes = dequantize(QuantTensor(blocks.view(shape[0], -1), quant_type, shape)).abs()
    assert magnitudes.max() < 2.0**40
    assert magnitudes[magnitudes > 0].min() > 2.0**-100
