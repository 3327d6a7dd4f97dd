"""States that a chain leaves behind on its way: the bits of separate calls, in C++ and by the definition."""

import pytest
import torch
from cpu_cases import Output, Results, run_everywhere, same_bits
from delta_cases import DeltaCase
from hypothesis import given, settings
from hypothesis import strategies as st
from state_boundaries import Chain, rows_of, separately, some_chains, states_of

from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import batch_rows
from coldstream.kernels.ops import MIN_FORK_ROWS, DeltaNetInputs
from coldstream.kernels.reference_ops import ReferenceOps

Runtimes = list[_csrc.Runtime]
NUM_STATES = 8
MIN = MIN_FORK_ROWS


def case_of(chains: list[Chain], head_dim: int = 16, num_taps: int = 4) -> DeltaCase:
    return DeltaCase(1, 2, head_dim, states_of(chains), num_taps, NUM_STATES)


def run(runtime: _csrc.Runtime, case: DeltaCase, chains: list[Chain]) -> Results:
    w, states, rows = case.weights(), case.states(), rows_of(chains)
    out = Output(len(case.state_ids), case.value_width)
    _csrc.gated_delta_net(
        runtime, *case.inputs(), w.conv_taps, w.a, w.dt_bias, w.norm, w.key_head_ids, w.num_key_heads, w.eps,
        *states, rows.state_ids, out.rows, batch_rows(rows.batch),
    )  # fmt: skip
    return out.checked(), *states


@given(chains=some_chains(NUM_STATES))
@settings(max_examples=40, deadline=None)
def test_boundaries_change_no_bit(fastest: _csrc.Runtime, chains: list[Chain]) -> None:
    case = case_of(chains)
    found, expected = run(fastest, case, chains), separately(case, chains)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.sharded(6)
@pytest.mark.parametrize("num_taps", [1, 2, 16])
@pytest.mark.parametrize("head_dim", [7, 64, 100])
def test_every_tier_leaves_the_same_states(runtimes: Runtimes, head_dim: int, num_taps: int) -> None:
    chains = [Chain(1, (6,)), Chain(MIN + 3, (3, 0, 5), (MIN, MIN + 1)), Chain(1, (2,)), Chain(9, (1,))]
    case = case_of(chains, head_dim, num_taps)
    found = run_everywhere(lambda runtime: run(runtime, case, chains), runtimes)
    for one, other in zip(found, separately(case, chains), strict=True):
        assert same_bits(one, other)


@given(chains=some_chains(NUM_STATES, 24), data=st.data())
@settings(max_examples=10, deadline=None)
def test_the_definition_is_separate_calls(chains: list[Chain], data: st.DataObject) -> None:
    exact = data.draw(st.booleans())
    case = case_of(chains, head_dim=8)
    states = case.states()
    inputs = DeltaNetInputs(*case.inputs(), rows_of(chains))
    out = ReferenceOps(exact=exact).gated_delta_net(inputs, case.weights(), *states)
    for found, expected in zip((out, *states), separately(case, chains), strict=True):
        tolerance = 0.0 if exact else 1e-4
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ([Chain(MIN + 4, (0, 1), (MIN - 1,))], "first rows of a chain"),
        ([Chain(3, (0, 1), (2,))], "first rows of a chain"),
        ([Chain(MIN + 4, (0, -1), (MIN,))], "state lies outside the states"),
        ([Chain(MIN + 4, (0, NUM_STATES), (MIN,))], "state lies outside the states"),
        ([Chain(MIN + 4, (0, 1, 0), (MIN, MIN + 2))], "must be adjacent"),
        ([Chain(MIN + 4, (0, 1), (MIN,)), Chain(1, (1,))], "must be adjacent"),
        ([Chain(1, (1,)), Chain(MIN + 4, (0, 1), (MIN,))], "must be adjacent"),
    ],
)
def test_bad_boundaries_are_refused_and_change_nothing(
    fastest: _csrc.Runtime, chains: list[Chain], message: str
) -> None:
    case, rows = case_of(chains), rows_of(chains)
    w, states, out = case.weights(), case.states(), Output(len(case.state_ids), case.value_width)
    with pytest.raises(ValueError, match=message):
        _csrc.gated_delta_net(
            fastest, *case.inputs(), w.conv_taps, w.a, w.dt_bias, w.norm, w.key_head_ids, w.num_key_heads,
            w.eps, *states, rows.state_ids, out.rows, batch_rows(rows.batch),
        )  # fmt: skip
    assert all(same_bits(a, b) for a, b in zip(states, case.states(), strict=True))
    assert out.rows.isnan().all()
