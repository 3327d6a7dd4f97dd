"""Rows whose tokens the device has chosen: the kernel on the host against a definition in Python."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.errors import InvalidRequestError
from coldstream.kernels.cuda.staged import StagedRing
from coldstream.kernels.sample.admit import MAX_ENDS, Admission, admission_values, admit_rows

NUM_ROWS, COLUMNS, PADDED = 7, 5, 9

results = st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 0, 3, -1]))
end_ids = st.frozensets(st.integers(0, 9), max_size=4) | st.just(frozenset(range(3, 90)))
rows_of_steps = st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=NUM_ROWS, unique=True)


def admit(admissions: Sequence[Admission], chosen: Sequence[tuple[int, int]], device: str) -> torch.Tensor:
    """The inputs of a step, whose numbers were 100 and more before."""
    where = torch.device(device)
    staged = StagedRing(torch.zeros(admission_values(NUM_ROWS), dtype=torch.int32, device=where))
    rows = Guarded(COLUMNS, PADDED, dtype=torch.int32, device=where)
    rows.tensor.copy_(torch.arange(100, 100 + COLUMNS * PADDED).view(COLUMNS, PADDED))
    admit_rows(admissions, staged, torch.tensor(chosen, dtype=torch.int32, device=where), rows.tensor)
    return rows.checked()


def check_any_rows(device: str, rows: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(results, min_size=1, max_size=6))
    numbers = st.integers(0, len(chosen) - 1)
    admissions = [Admission(row, data.draw(numbers), data.draw(end_ids)) for row in rows]
    expected = np.arange(100, 100 + COLUMNS * PADDED).reshape(COLUMNS, PADDED)
    for each in admissions:
        token, fault = chosen[each.chosen]
        if fault or token in each.end_ids:
            expected[:, each.row] = 0, *[-1] * (COLUMNS - 1)
        else:
            expected[0, each.row] = token
    assert admit(admissions, chosen, device).tolist() == expected.tolist()


@pytest.mark.usefixtures("gpu")
@given(rows_of_steps, st.data())
@settings(max_examples=60)
def test_rows_get_their_tokens_or_are_left_out(rows: list[int], data: st.DataObject) -> None:
    check_any_rows("cpu", rows, data)


@pytest.mark.gpu
@given(rows_of_steps, st.data())
@settings(max_examples=60)
def test_rows_get_their_tokens_or_are_left_out_on_a_gpu(rows: list[int], data: st.DataObject) -> None:
    check_any_rows("cuda", rows, data)


@pytest.mark.usefixtures("gpu")
def test_more_end_tokens_than_there_is_memory_for_are_refused() -> None:
    half = frozenset(range(MAX_ENDS // 2))
    found = admit([Admission(0, 0, half), Admission(1, 0, half)], [(MAX_ENDS - 1, 0)], "cpu")
    assert found[0, :2].tolist() == [MAX_ENDS - 1] * 2
    with pytest.raises(InvalidRequestError, match=f"{MAX_ENDS + 1} end tokens"):
        admit([Admission(0, 0, half), Admission(1, 0, half | {MAX_ENDS})], [(1, 0)], "cpu")
