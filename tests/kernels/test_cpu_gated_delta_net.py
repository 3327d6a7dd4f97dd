"""The C++ gated DeltaNet: the reference's values, and the same bits however rows are divided among calls."""

import functools
from itertools import pairwise

import pytest
import torch
from cpu_cases import Output, Results, run_everywhere, same_bits
from delta_cases import DeltaCase, one_state
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels import _csrc
from coldstream.kernels.gated_delta_net.reference import gated_delta_net as gated_delta_net_reference
from coldstream.kernels.ops import DeltaNetInputs, DeltaNetWeights, Rows

Runtimes = list[_csrc.Runtime]
NUM_STATES = 12


Case = functools.partial(DeltaCase, num_states=NUM_STATES)


def call_op(
    runtime: _csrc.Runtime,
    case: DeltaCase,
    part: slice,
    states: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    w = case.weights()
    _csrc.gated_delta_net(
        runtime, *(x[part] for x in case.inputs()), w.conv_taps, w.a, w.dt_bias, w.norm, w.key_head_ids,
        w.num_key_heads, w.eps, *states, case.state_ids_tensor()[part], out,
        has_sigmoid_gate=w.output_gate == "sigmoid",
    )  # fmt: skip


def run(runtime: _csrc.Runtime, case: DeltaCase, bounds: list[int] | None = None) -> Results:
    """The outputs and both states after calls on the rows between consecutive `bounds`."""
    states, outputs = case.states(), []
    bounds = [0, len(case.state_ids)] if bounds is None else bounds
    for start, stop in pairwise(bounds):
        out = Output(stop - start, case.num_value_heads * case.head_dim)
        call_op(runtime, case, slice(start, stop), states, out.rows)
        outputs.append(out.checked())
    return torch.cat(outputs), *states


def check_values(case: DeltaCase, result: Results) -> None:
    states = [state.double() for state in case.states()]
    w = case.weights()
    exact = DeltaNetWeights(
        *(x.double() for x in (w.conv_taps, w.a, w.dt_bias, w.norm)),
        w.key_head_ids,
        w.num_key_heads,
        w.eps,
        w.output_gate,
    )
    inputs = (x.double() for x in case.inputs())
    state_ids = case.state_ids_tensor()
    rows = Rows(torch.zeros_like(state_ids), state_ids)
    output = gated_delta_net_reference(DeltaNetInputs(*inputs, rows), exact, *states)
    for got, want in zip(result, (output, *states), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_head_sizes(runtimes: Runtimes, head_dim: int, num_rows: int) -> None:
    case = Case(2, 4, head_dim, one_state(num_rows))
    check_values(case, run_everywhere(lambda runtime: run(runtime, case), runtimes))


@pytest.mark.parametrize(("num_key_heads", "num_value_heads"), [(1, 1), (1, 3), (2, 2), (3, 9), (4, 20)])
def test_head_groups(runtimes: Runtimes, num_key_heads: int, num_value_heads: int) -> None:
    case = Case(num_key_heads, num_value_heads, 16, one_state(18))
    check_values(case, run_everywhere(lambda runtime: run(runtime, case), runtimes))


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_an_output_gate_that_is_a_sigmoid(runtimes: Runtimes, num_rows: int) -> None:
    case = Case(2, 4, 17, one_state(num_rows), output_gate="sigmoid")
    found = run_everywhere(lambda runtime: run(runtime, case), runtimes)
    check_values(case, found)
    for got, exact in zip(found, case.expected(), strict=True):
        assert same_bits(got, exact)


@pytest.mark.parametrize("num_taps", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 20])
def test_convolution_state(runtimes: Runtimes, num_taps: int, num_rows: int) -> None:
    case = Case(1, 2, 8, one_state(num_rows), num_taps)
    check_values(case, run_everywhere(lambda runtime: run(runtime, case), runtimes))


def test_chunked_prefill_is_token_by_token(fastest: _csrc.Runtime) -> None:
    case = Case(2, 4, 32, one_state(100))
    whole = run(fastest, case)
    check_values(case, whole)
    for bounds in (list(range(101)), [0, 1, 3, 64, 66, 100], [0, 50, 100]):
        for want, got in zip(whole, run(fastest, case, bounds), strict=True):
            assert same_bits(want, got)


@given(bounds=st.sets(st.integers(1, 39), max_size=8))
@settings(max_examples=25, deadline=None)
def test_no_chunking_changes_a_bit(fastest: _csrc.Runtime, bounds: set[int]) -> None:
    case = Case(1, 2, 16, one_state(40))
    whole, parts = run(fastest, case), run(fastest, case, [0, *sorted(bounds), 40])
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("num_rows", [2, 3, 9, 64])
def test_sp02_states_of_several_sequences_do_not_meet(runtimes: Runtimes, num_rows: int) -> None:
    lengths: list[int] = []
    while sum(lengths) < num_rows:
        lengths.append(min(len(lengths) + 1, num_rows - sum(lengths)))
    runs = [one_state(length, state_id) for state_id, length in reversed(list(enumerate(lengths)))]
    case = Case(2, 4, 16, sum(runs, ()))
    together = run_everywhere(lambda runtime: run(runtime, case), runtimes)
    check_values(case, together)
    alone = run(runtimes[-1], case, list(range(num_rows + 1)))
    assert all(same_bits(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 100, 128, 160])
def test_sp02_single_tokens_beside_a_prompt(runtimes: Runtimes, head_dim: int) -> None:
    prompt = one_state(5, 11)
    case = Case(1, 2, head_dim, (4, 3, 2, *prompt, 10, 0, 1, 5, 6, 7, 8, 9))
    together = run_everywhere(lambda runtime: run(runtime, case), runtimes)
    check_values(case, together)
    alone = run(runtimes[-1], case, list(range(len(case.state_ids) + 1)))
    assert all(same_bits(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize(
    ("state_ids", "message"),
    [
        ([0, 0, -1], "state lies outside the states"),
        ([12], "state lies outside the states"),
        ([2**31 - 1], "state lies outside the states"),
        ([-(2**31)], "state lies outside the states"),
        ([0, 1, 0], "rows of a state must be adjacent"),
    ],
)
def test_bad_states_are_refused_and_change_nothing(
    runtimes: Runtimes, state_ids: list[int], message: str
) -> None:
    case = Case(1, 2, 8, tuple(state_ids))
    for runtime in runtimes:
        states, out = case.states(), Output(len(state_ids), 16)
        with pytest.raises(ValueError, match=message):
            call_op(runtime, case, slice(None), states, out.rows)
        assert all(same_bits(a, b) for a, b in zip(states, case.states(), strict=True))
        assert out.rows.isnan().all()
        run(runtime, Case(1, 2, 8, one_state(3)))


def test_wrong_arrays_are_refused(fastest: _csrc.Runtime) -> None:
    case = Case(2, 4, 8, one_state(2))
    w, (conv_state, state), out = case.weights(), case.states(), torch.zeros(2, 32)

    def call(**changes: torch.Tensor | int) -> None:
        arguments = {
            "conv_taps": w.conv_taps,
            "key_head_ids": w.key_head_ids,
            "num_key_heads": 2,
            "conv_state": conv_state,
            **changes,
        }
        _csrc.gated_delta_net(
            fastest, *case.inputs(), a=w.a, dt_bias=w.dt_bias, norm=w.norm, eps=w.eps, state=state,
            state_ids=case.state_ids_tensor(), out=out, **arguments,
        )  # fmt: skip

    with pytest.raises(ValueError, match="1 … 16 taps, not 17"):
        call(conv_taps=torch.zeros(64, 17))
    with pytest.raises(ValueError, match=r"key_head_ids\[3\] is 2"):
        call(key_head_ids=torch.tensor([0, 1, 0, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="64 channels, but 2 · 3 key and 4 value heads of 8"):
        call(num_key_heads=3)
    with pytest.raises(ValueError, match=r"conv_state must be \[12, 3, 64\]"):
        call(conv_state=torch.zeros(12, 2, 64))
