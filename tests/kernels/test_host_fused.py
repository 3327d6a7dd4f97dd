"""What a device decides within a fused step: the kernels on the host against their definition."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.fused.cuda import RESULT_WORDS, DeviceState, FusedArrays, FusedKernels
from coldstream.kernels.fused.reference import (
    NUM_COLUMNS,
    FusedState,
    accept,
    block_rows,
    link_row,
    model_rows,
)
from coldstream.kernels.sample.cuda import SETTINGS_WORDS, _RowSettings, write_rows
from coldstream.kernels.sample.settings import RowSettings

NUM_BLOCKS = 3
STATE_ID, BLOCK_STATE_ID = 5, 2
POSITION = _RowSettings.position.offset // 4  # word of a row's settings
SETTINGS = RowSettings(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 3, 8)


@dataclass(frozen=True)
class Case:
    """A fused step: the state before it, its draft, and what is chosen after each row."""

    state: FusedState
    draft: list[int]
    chosen: list[tuple[int, int]]
    end_ids: frozenset[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_rows = draw(st.sampled_from([1, 2, 3, 5, 33, 64]))
    tokens = st.integers(0, draw(st.sampled_from([1, 3])))
    state = FusedState(
        draw(st.integers(1, 600)), draw(st.integers(1, 600)), draw(st.integers(0, 70)), draw(tokens)
    )
    faulty_row, fault = draw(st.none() | st.integers(0, num_rows - 1)), draw(st.sampled_from([3, -1]))
    chosen = [(draw(tokens), fault if row == faulty_row else 0) for row in range(num_rows)]
    draft = [token for token, _ in chosen[:-1]]
    for _ in range(draw(st.integers(0, 2)) if draft else 0):
        draft[draw(st.integers(0, num_rows - 2))] = draw(tokens)
    end_ids = draw(st.frozensets(st.integers(1, 9), max_size=3) | st.just(frozenset(range(2, 90))))
    return Case(state, draft, chosen, end_ids)


def columns_of(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return np.array(rows).T.tolist()


def written(arrays: FusedArrays, case: Case) -> None:
    """What the host writes, and tokens that are chosen later."""
    arrays.write_state(case.state, STATE_ID, BLOCK_STATE_ID, len(case.end_ids))
    num_rows = len(case.chosen)
    arrays.kept[:num_rows] = np.arange(100, 100 + num_rows)
    write_rows([SETTINGS] * num_rows, range(num_rows), arrays.settings[:num_rows], np.zeros(0, np.int32))
    arrays.ends[: len(case.end_ids)] = list(case.end_ids)
    arrays.chosen[:num_rows] = case.chosen


def check_fused(case: Case, device: str) -> None:
    memory = Guarded(FusedArrays.num_values(NUM_BLOCKS), dtype=torch.int32, device=torch.device(device))
    host = np.full(FusedArrays.num_values(NUM_BLOCKS), -7, np.int32)
    written(FusedArrays(host, NUM_BLOCKS), case)
    memory.tensor.copy_(torch.from_numpy(host))
    candidate = torch.zeros(1, dtype=torch.int32, device=device)
    num_rows, state = len(case.chosen), case.state
    kernels = FusedKernels(FusedArrays(memory.tensor, NUM_BLOCKS), num_rows, candidate)
    for depth, token in enumerate(case.draft):
        candidate.fill_(token)
        kernels.extend_draft(depth)
        link = FusedArrays(memory.checked(), NUM_BLOCKS).link_columns.tolist()
        assert link == list(link_row(state, num_rows, depth, token, BLOCK_STATE_ID))
    kernels.write_model_rows()
    kernels.accept_rows()
    check_results(FusedArrays(memory.checked().numpy(), NUM_BLOCKS), FusedArrays(host, NUM_BLOCKS), case)


def check_results(found: FusedArrays, before: FusedArrays, case: Case) -> None:
    """Every number that the kernels wrote, and that they wrote no others."""
    num_rows, state = len(case.chosen), case.state
    accepted, after = accept(state, case.draft, case.chosen, case.end_ids)
    count = len(accepted.token_ids)
    used = NUM_COLUMNS * num_rows
    rows = model_rows(state, case.draft, STATE_ID, range(100, 100 + num_rows))
    assert found.model_columns[:used].reshape(NUM_COLUMNS, -1).tolist() == columns_of(rows)
    rows = block_rows(state, accepted.token_ids, num_rows, BLOCK_STATE_ID)
    assert found.block_columns[:used].reshape(NUM_COLUMNS, -1).tolist() == columns_of(rows)
    assert (found.count[0], found.first[0]) == (count, state.length)
    padding = [-1] * (num_rows - count)
    result = found.result[: RESULT_WORDS + num_rows].tolist()
    assert result == [count, accepted.fault, *accepted.token_ids, *padding]
    observed = DeviceState.from_buffer_copy(found.state.tobytes())
    assert FusedState(observed.length, observed.block_length, observed.left, observed.root) == after
    assert (observed.last_row, observed.state_id) == (max(count - 1, 0), STATE_ID)
    settings = found.settings[:num_rows].copy()
    assert settings[:, POSITION].tolist() == [state.length + 1 + row for row in range(num_rows)]
    settings[:, POSITION] = SETTINGS.position
    assert np.array_equal(settings, before.settings[:num_rows])
    for name in ("table", "block_table", "kept", "sources", "ends", "chosen"):
        assert np.array_equal(getattr(found, name), getattr(before, name)), name
    assert (found.model_columns[used:] == -7).all()
    assert (found.result[RESULT_WORDS + num_rows :] == -7).all()


@pytest.mark.usefixtures("gpu")
@given(cases())
@settings(max_examples=60)
def test_fused_steps_decide_as_defined(case: Case) -> None:
    check_fused(case, "cpu")


@pytest.mark.gpu
@given(cases())
@settings(max_examples=200)
def test_fused_steps_decide_as_defined_on_a_gpu(case: Case) -> None:
    check_fused(case, "cuda")


def test_the_arrays_do_not_overlap_and_fill_their_memory() -> None:
    memory = np.zeros(FusedArrays.num_values(NUM_BLOCKS), np.int32)
    arrays = FusedArrays(memory, NUM_BLOCKS)
    parts = [
        part for name, part in vars(arrays).items() if isinstance(part, np.ndarray) and name != "_memory"
    ]
    for part in parts:
        part += 1
    assert (memory == 1).all()
    assert arrays.settings.shape[1] == SETTINGS_WORDS
    assert arrays.settings.ctypes.data % 8 == memory.ctypes.data % 8


def test_an_ended_text_stays_as_it_is() -> None:
    state = FusedState(9, 4, 0, 7)
    accepted, after = accept(state, [1, 2], [(1, 0), (2, 0), (3, 0)], frozenset())
    assert (accepted.token_ids, accepted.num_drafted, after) == ((), 0, state)


@given(cases())
def test_fused_steps_follow_the_plain_loop(case: Case) -> None:
    """The rows that are kept are those of tokens that were drafted and chosen, up to the end of the text."""
    accepted, after = accept(case.state, case.draft, case.chosen, case.end_ids)
    expected: list[int] = []
    left = case.state.left
    tokens = [case.state.root, *case.draft]
    fault = 0
    for row in range(len(tokens)):
        if left == 0 or (row and tokens[row] != expected[-1]):
            break
        token, fault = case.chosen[row]
        if fault:
            left = 0
            break
        expected.append(token)
        left = 0 if token in case.end_ids else left - 1
    assert (accepted.token_ids, accepted.fault, after.left) == (tuple(expected), fault, left)
    assert after.length - case.state.length == len(expected) == after.block_length - case.state.block_length
