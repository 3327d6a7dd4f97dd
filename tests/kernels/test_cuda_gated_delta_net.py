"""The CUDA gated DeltaNet equals the exact reference bit for bit, however rows are divided among launches."""

from itertools import pairwise

import pytest
import torch
from delta_cases import DeltaCase, check_results, one_state, weights_on
from guarded import Guarded

from all_pairs import all_pairs
from bench.kernels.machine_code import code_bytes, stack_bytes
from coldstream.kernels.arithmetic.quantised import QuantActivations, padded_cols
from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.gated_delta_net.arguments import HEAD_SIZES, PrefillWorkspace
from coldstream.kernels.gated_delta_net.cuda import (
    DECODE,
    PREFILL,
    REPLAY,
    DecodeWorkspace,
    arrival_count,
    delta_net_decode_cuda,
    delta_net_prefill_cuda,
)
from coldstream.kernels.ops import DeltaNetInputs, Rows

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100)


def decode_workspace(case: DeltaCase, num_rows: int) -> DecodeWorkspace:
    count = arrival_count(num_rows, case.num_key_heads, case.value_width)
    return DecodeWorkspace(
        torch.full((num_rows, case.value_width), torch.nan, device="cuda"),
        torch.zeros(count, dtype=torch.int32, device="cuda"),
    )


def prefill_workspace(case: DeltaCase, num_rows: int) -> PrefillWorkspace:
    widths = (2 * case.num_key_heads * case.head_dim, case.value_width, 2 * case.num_value_heads)
    floats = [torch.full((num_rows, width), torch.nan, device="cuda") for width in widths]
    raw = torch.full((num_rows, case.value_width), torch.nan, device="cuda")
    return PrefillWorkspace(*floats, raw, torch.zeros(case.num_states, 2, dtype=torch.int32, device="cuda"))


def launch(
    mode: str, case: DeltaCase, inputs: DeltaNetInputs, states: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The output and its quantised parts of one call, which advances `states`."""
    num_rows, padded = inputs.qkv.shape[0], padded_cols(case.value_width)
    shapes = (
        (num_rows, case.value_width),
        (num_rows, padded),
        (num_rows, padded // 256),
        (num_rows, padded // 16),
    )
    dtypes = (torch.float32, torch.int8, torch.float32, torch.int16)
    guarded = [Guarded(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    out, *parts = (part.tensor for part in guarded)
    weights = weights_on(case.weights(), torch.device("cuda"))
    if mode == "decode":
        work = decode_workspace(case, num_rows)
        delta_net_decode_cuda(inputs, weights, *states, out, QuantActivations(*parts), work)
        assert not work.arrivals.any()
    else:
        work = prefill_workspace(case, num_rows)
        delta_net_prefill_cuda(inputs, weights, *states, out, QuantActivations(*parts), work)
        assert not work.spans.any()
    return [part.checked() for part in guarded]


def run(case: DeltaCase, modes: list[str], bounds: list[int]) -> list[torch.Tensor]:
    """Output, quantised parts and both states after calls on the rows between consecutive `bounds`."""
    states = [state.cuda() for state in case.states()]
    tensors = [tensor.cuda() for tensor in (*case.inputs(), case.state_ids_tensor())]
    results = []
    for mode, (start, stop) in zip(modes, pairwise(bounds), strict=True):
        *projections, state_ids = (tensor[start:stop] for tensor in tensors)
        inputs = DeltaNetInputs(*projections, Rows(torch.zeros_like(state_ids), state_ids))
        results.append(launch(mode, case, inputs, states))
    return [torch.cat(parts) for parts in zip(*results, strict=True)] + [state.cpu() for state in states]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    ("program", "instance"),
    [(program, name) for program in (DECODE, PREFILL, REPLAY) for name in program.instances[::5]],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles(program: CudaProgram, instance: str, arch: str) -> None:
    assert compile_instance(program.source, instance, arch).cubin


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_a_walk_keeps_its_warps_together(head_dim: int) -> None:
    """Or else the compiler makes it twice as long, see `delta_recurrence`; and its state is in registers."""
    code = compile_instance(PREFILL.source, f"delta_recurrence<{head_dim}>", "sm_90a")
    assert code_bytes(code) < 33_000
    assert stack_bytes(code) == 0


@pytest.mark.gpu
@all_pairs(mode=["decode", "prefill"], head_dim=[32, 64, 128], num_rows=SIZES)
def test_rows_of_one_sequence(mode: str, head_dim: int, num_rows: int) -> None:
    case = DeltaCase(1, 2, head_dim, one_state(num_rows))
    check_results(case, run(case, [mode], [0, num_rows]))


@pytest.mark.gpu
@all_pairs(mode=["decode", "prefill"], num_taps=[2, 3, 5, 8], num_rows=[1, 2, 5, 9, 40])
def test_widths_of_the_convolution(mode: str, num_taps: int, num_rows: int) -> None:
    case = DeltaCase(1, 1, 32, one_state(num_rows), num_taps)
    check_results(case, run(case, [mode], [0, num_rows]))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("num_key_heads", "num_value_heads", "head_dim"),
    [(1, 1, 32), (1, 3, 64), (3, 9, 32), (2, 5, 128), (4, 8, 64), (16, 32, 128)],
)
def test_heads(mode: str, num_key_heads: int, num_value_heads: int, head_dim: int) -> None:
    case = DeltaCase(num_key_heads, num_value_heads, head_dim, one_state(3))
    check_results(case, run(case, [mode], [0, 3]))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_sequences_do_not_meet(mode: str) -> None:
    lengths = {4: 1, 0: 2, 5: 17, 2: 3, 1: 40}
    state_ids = tuple(state_id for state_id, length in lengths.items() for _ in range(length))
    case = DeltaCase(2, 4, 32, state_ids)
    together = run(case, [mode], [0, len(state_ids)])
    check_results(case, together)
    edges = [0, 1, 3, 20, 23, 63]
    check_results(case, run(case, [mode] * 5, edges))


@pytest.mark.gpu
def test_each_row_its_own_sequence() -> None:
    case = DeltaCase(2, 4, 64, tuple(reversed(range(64))), num_states=64)
    for mode in ("decode", "prefill"):
        check_results(case, run(case, [mode], [0, 64]))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 128])
def test_no_chunking_changes_a_bit(head_dim: int) -> None:
    case = DeltaCase(1, 2, head_dim, one_state(70))
    expected = case.expected()
    check_results(case, run(case, ["decode"] * 70, list(range(71))), expected)
    check_results(case, run(case, ["prefill", "decode", "prefill", "decode"], [0, 33, 34, 64, 70]), expected)
    check_results(case, run(case, ["decode", "prefill", "prefill"], [0, 3, 4, 70]), expected)


@pytest.mark.gpu
def test_a_thousand_rows() -> None:
    case = DeltaCase(1, 1, 32, one_state(1000))
    expected = case.expected()
    check_results(case, run(case, ["prefill"], [0, 1000]), expected)
    check_results(case, run(case, ["prefill"] * 3, [0, 64, 500, 1000]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_projections_of_one_product(mode: str) -> None:
    """Rows of all projections side by side."""
    case = DeltaCase(2, 4, 32, one_state(9))
    widths = [case.num_channels, case.value_width, case.num_value_heads, case.num_value_heads]
    side_by_side = torch.cat(case.inputs(), dim=1).cuda()
    state_ids = case.state_ids_tensor().cuda()
    inputs = DeltaNetInputs(
        *torch.split(side_by_side, widths, dim=1), Rows(torch.zeros_like(state_ids), state_ids)
    )
    states = [state.cuda() for state in case.states()]
    check_results(case, launch(mode, case, inputs, states) + [state.cpu() for state in states])
