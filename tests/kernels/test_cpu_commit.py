"""The C++ commits of an accepted path: the bits of a chain, whatever the tier, and nothing for a bad path."""

import pytest
import torch
from cpu_cases import Results, run_everywhere, same_bits
from delta_cases import DeltaCase, one_state
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels import _csrc
from coldstream.kernels.ops import BLOCK_POSITIONS

Runtimes = list[_csrc.Runtime]
BLOCKS = [3, 0, 4]  # of the sequence, among NUM_BLOCKS
NUM_BLOCKS = 5


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _replay(
    runtime: _csrc.Runtime,
    case: DeltaCase,
    kept_ids: list[int],
    state_id: int,
    states: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both states, by default the case's, after a commit of rows of the case's inputs."""
    w, states = case.weights(), states or case.states()
    qkv, _, alpha, beta = case.inputs()
    out = torch.empty(len(kept_ids), case.value_width)
    _csrc.commit_delta_net(
        runtime, qkv, alpha, beta, w.conv_taps, w.a, w.dt_bias, w.norm, w.key_head_ids, w.num_key_heads,
        w.eps, *states, _ints(state_id), _ints(*kept_ids), out,
    )  # fmt: skip
    return states


def _chain(runtime: _csrc.Runtime, case: DeltaCase, kept_ids: list[int], state_id: int) -> Results:
    """Both states after these rows as a chain."""
    w, states = case.weights(), case.states()
    rows = [each[kept_ids] for each in case.inputs()]
    _csrc.gated_delta_net(
        runtime, *rows, w.conv_taps, w.a, w.dt_bias, w.norm, w.key_head_ids, w.num_key_heads, w.eps, *states,
        _ints(*one_state(len(kept_ids), state_id)), torch.empty(len(kept_ids), case.value_width),
    )  # fmt: skip
    return states


@pytest.mark.parametrize("head_dim", [7, 16, 64])
@pytest.mark.parametrize("kept_ids", [[0], [5], [2, 0], [1, 3, 4, 9], list(range(16)), list(range(20))])
def test_sp04_trap_conv_left_behind_a_replay_leaves_both_states_of_a_chain(
    runtimes: Runtimes, head_dim: int, kept_ids: list[int]
) -> None:
    case = DeltaCase(2, 4, head_dim, one_state(20))
    replayed = run_everywhere(lambda runtime: _replay(runtime, case, kept_ids, 3), runtimes)
    for want, got in zip(_chain(runtimes[-1], case, kept_ids, 3), replayed, strict=True):
        assert same_bits(want, got)


@given(st.permutations(range(9)), st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_any_rows_in_any_state(fastest: _csrc.Runtime, order: list[int], count: int, state_id: int) -> None:
    case, kept_ids = DeltaCase(1, 2, 16, one_state(9)), order[:count]
    replayed = _replay(fastest, case, kept_ids, state_id)
    for want, got in zip(_chain(fastest, case, kept_ids, state_id), replayed, strict=True):
        assert same_bits(want, got)


@pytest.mark.parametrize(
    ("kept_ids", "state_id", "message"),
    [
        ([0, 9], 0, "a replayed row lies outside the kept inputs"),
        ([-1], 0, "a replayed row lies outside the kept inputs"),
        ([0], 6, "state lies outside the states"),
        ([0], -1, "state lies outside the states"),
    ],
)
def test_a_bad_replay_changes_nothing(
    fastest: _csrc.Runtime, kept_ids: list[int], state_id: int, message: str
) -> None:
    case = DeltaCase(1, 2, 16, one_state(9))
    states = case.states()
    with pytest.raises(ValueError, match=message):
        _replay(fastest, case, kept_ids, state_id, states)
    assert all(same_bits(a, b) for a, b in zip(states, case.states(), strict=True))


def _caches(dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (NUM_BLOCKS, BLOCK_POSITIONS, 2, 3)
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    return [(numbers % 251 - 125 + cache).to(dtype) for cache in range(2)]


def _moved(cache: torch.Tensor, first: int, sources: list[int]) -> torch.Tensor:
    result = cache.clone()
    for to, source in enumerate(sources):
        places = [
            (BLOCKS[at // BLOCK_POSITIONS], at % BLOCK_POSITIONS) for at in (first + source, first + to)
        ]
        result[places[1]] = cache[places[0]]
    return result


@given(
    st.sampled_from([0, 1, 200, 250, 255, 256, 500, 700]),
    st.sets(st.integers(0, 63), min_size=1).map(sorted),
    st.sampled_from([torch.int8, torch.float16, torch.float32]),
)
@settings(deadline=None)
def test_rows_move_to_the_positions_after_the_committed_ones(
    fastest: _csrc.Runtime, first: int, sources: list[int], dtype: torch.dtype
) -> None:
    caches = _caches(dtype)
    _csrc.commit_attention(fastest, *caches, _ints(first), _ints(*sources), _ints(*BLOCKS))
    for got, before in zip(caches, _caches(dtype), strict=True):
        assert torch.equal(got, _moved(before, first, sources))


@pytest.mark.parametrize(
    ("first", "sources", "table", "message"),
    [
        (700, [0, 70], BLOCKS, "outside its sequence"),
        (-1, [1], BLOCKS, "outside its sequence"),
        (0, [1, 0], BLOCKS, "outside its sequence"),
        (250, [0, 30], [3, 5, 4], "outside the caches"),
        (250, [0, 30], [-1, 0, 4], "outside the caches"),
    ],
)
def test_rows_that_do_not_exist_move_nothing(
    fastest: _csrc.Runtime, first: int, sources: list[int], table: list[int], message: str
) -> None:
    caches = _caches(torch.int8)
    with pytest.raises(ValueError, match=message):
        _csrc.commit_attention(fastest, *caches, _ints(first), _ints(*sources), _ints(*table))
    assert all(map(torch.equal, caches, _caches(torch.int8)))
