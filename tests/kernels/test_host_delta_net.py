"""The gated DeltaNet of chains and draft trees as the GPU's kernels compute it, on the host and on a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from delta_cases import DeltaCase, weights_on
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.arithmetic.quantised import QuantActivations, padded_cols
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.gated_delta_net import cuda
from coldstream.kernels.gated_delta_net.arguments import PrefillWorkspace
from coldstream.kernels.gated_delta_net.batch import gated_delta_net_batch
from coldstream.kernels.gated_delta_net.exact import gated_delta_net_exact
from coldstream.kernels.ops import (
    MAX_TREE_ROWS,
    BatchRows,
    CommittedPath,
    DeltaNetInputs,
    KeptInputs,
    RecurrentLayer,
    Rows,
)
from coldstream.kernels.reference_ops import ReferenceOps
from host_device import HostDevice

NUM_KEPT = 200


@dataclass(frozen=True)
class Part:
    """Rows of one sequence: a chain, or a draft tree of these parents; `state_id` −1: of none."""

    state_id: int
    num_rows: int
    parents: tuple[int, ...] | None = None


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_of(parts: list[Part], kept: KeptInputs | None, random: Random) -> Rows:
    state_ids, segments, parents, places = [], [], [], []
    free = random.sample(range(NUM_KEPT), NUM_KEPT)
    for number, part in enumerate(parts):
        start = len(state_ids)
        state_ids += [part.state_id] * part.num_rows
        segments += [number] * part.num_rows
        own = range(-1, part.num_rows - 1) if part.parents is None else part.parents
        parents += [start + parent if parent >= 0 else -1 for parent in own]
        places += [-1] * part.num_rows if part.parents is None else [free.pop() for _ in own]
    empty = torch.zeros(len(parts), 1, dtype=torch.int32)
    zeros = torch.zeros(len(state_ids), dtype=torch.int32)
    has_trees = any(part.parents is not None for part in parts)
    batch = BatchRows(ints(segments), empty, zeros, ints(parents), ints(places), kept, has_trees=has_trees)
    return Rows(zeros, ints(state_ids), batch)


def kept_inputs(case: DeltaCase) -> KeptInputs:
    widths = (case.num_channels, case.num_value_heads, case.num_value_heads)
    return KeptInputs(*(torch.zeros(NUM_KEPT, width) for width in widths))


def on(device: str, rows: Rows, kept: KeptInputs) -> Rows:
    batch = rows.batch
    assert batch is not None
    tensors = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
    return Rows(
        rows.positions.to(device), rows.state_ids.to(device), BatchRows(**{**tensors, "inputs": kept})
    )


def without_padding(parts: list[Part]) -> list[int]:
    """Numbers of the rows that are of a sequence."""
    owners = [part.state_id for part in parts for _ in range(part.num_rows)]
    return [row for row, state_id in enumerate(owners) if state_id >= 0]


def check(
    case: DeltaCase, parts: list[Part], seed: int, device: str = "cpu", *, is_prompt: bool = False
) -> None:
    """Outputs, states and kept inputs of a batch, then a commit of each tree's longest path."""
    kept, found_kept = kept_inputs(case), kept_inputs(case)
    found_kept = KeptInputs(*(tensor.to(device) for tensor in vars(found_kept).values()))
    rows = rows_of(parts, kept, Random(seed))
    inputs, weights, states = case.inputs(), case.weights(), case.states()
    real = without_padding(parts)
    expected_states = [state.clone() for state in states]
    real_rows = rows_of([part for part in parts if part.state_id >= 0], kept, Random(seed))
    expected = torch.zeros(len(case.state_ids), case.value_width)
    expected[real] = gated_delta_net_batch(
        gated_delta_net_exact,
        DeltaNetInputs(*(tensor[real] for tensor in inputs), real_rows),
        weights,
        *expected_states,
    )
    found_states = [state.to(device) for state in states]
    num_rows, padded = len(case.state_ids), padded_cols(case.value_width)
    out = torch.full((num_rows, case.value_width), torch.nan, device=device)
    quantised = QuantActivations(
        torch.ones(num_rows, padded, dtype=torch.int8, device=device),
        torch.ones(num_rows, padded // 256, device=device),
        torch.ones(num_rows, padded // 16, dtype=torch.int16, device=device),
    )
    on_device = on(device, rows, found_kept)
    operands = DeltaNetInputs(*(tensor.to(device) for tensor in inputs), on_device)
    weights_there = weights_on(weights, torch.device(device))
    raw = torch.full((num_rows, case.value_width), torch.nan, device=device)
    count = cuda.arrival_count(num_rows, case.num_key_heads, case.value_width)
    arrivals = torch.zeros(count, dtype=torch.int32, device=device)
    arguments = (operands, weights_there, *found_states, out, quantised)
    if is_prompt:
        cuda.delta_net_prefill_cuda(*arguments, prefill_workspace(case, raw))
    if not is_prompt or any(part.parents is not None for part in parts):
        work = cuda.DecodeWorkspace(raw, arrivals)
        cuda.delta_net_decode_cuda(*arguments, work, computes_chains=not is_prompt)
    assert not arrivals.any()
    assert torch.equal(out.cpu(), expected)
    wanted = quantize_activations(torch.nn.functional.pad(expected, (0, padded - case.value_width)))
    for one, other in zip(vars(quantised).values(), vars(wanted).values(), strict=True):
        assert torch.equal(one.cpu(), other)
    for one, other in zip(found_states, expected_states, strict=True):
        assert torch.equal(one.cpu(), other)
    for one, other in zip(vars(found_kept).values(), vars(kept).values(), strict=True):
        assert torch.equal(one.cpu(), other)
    check_commits(case, parts, rows, kept, found_kept, expected_states, found_states, device)


def prefill_workspace(case: DeltaCase, raw: torch.Tensor) -> PrefillWorkspace:
    widths = (2 * case.num_key_heads * case.head_dim, case.value_width, 2 * case.num_value_heads)
    floats = [torch.full((len(raw), width), torch.nan, device=raw.device) for width in widths]
    return PrefillWorkspace(
        *floats, raw, torch.zeros(case.num_states, 2, dtype=torch.int32, device=raw.device)
    )


def check_commits(
    case: DeltaCase,
    parts: list[Part],
    rows: Rows,
    kept: KeptInputs,
    found_kept: KeptInputs,
    expected_states: list[torch.Tensor],
    found_states: list[torch.Tensor],
    device: str,
) -> None:
    assert rows.batch is not None
    weights, start = case.weights(), 0
    for part in parts:
        if part.parents is not None:
            path = [part.num_rows - 1]
            while part.parents[path[0]] >= 0:
                path.insert(0, part.parents[path[0]])
            places = [int(rows.batch.kept[start + row]) for row in path]
            fill = [10**6] * (MAX_TREE_ROWS - len(path))
            committed = CommittedPath(
                *map(ints, ([part.state_id], [len(path)], [0], path + fill, places + fill, [0]))
            )
            layer = RecurrentLayer(weights, *expected_states, kept)
            ReferenceOps(exact=True).commit_delta_net([layer], committed)
            there = CommittedPath(*(each.to(device) for each in vars(committed).values() if each is not None))
            readers = torch.zeros(1, case.num_key_heads, dtype=torch.int32, device=device)
            layer = RecurrentLayer(weights_on(weights, torch.device(device)), *found_states, found_kept)
            cuda.delta_net_replay_cuda([layer], there, readers)
            assert not readers.any()
        start += part.num_rows
    for one, other in zip(found_states, expected_states, strict=True):
        assert torch.equal(one.cpu(), other)


@st.composite
def some_parts(draw: st.DrawFn) -> list[Part]:
    """Chains have states of their own; trees may share one."""
    parts, free = [], [0, 1, 2, 3]
    for _ in range(draw(st.integers(1, 4))):
        num_rows = draw(st.integers(1, 7))
        if draw(st.booleans()):
            parents = tuple(draw(st.integers(-1, i - 1)) for i in range(num_rows))
            parts.append(Part(draw(st.integers(4, 5)), num_rows, parents))
        elif free:
            parts.append(Part(free.pop(draw(st.integers(0, len(free) - 1))), num_rows))
    if draw(st.booleans()) or not parts:
        parts.append(Part(-1, draw(st.integers(1, 2))))
    return parts


def case_of(heads: tuple[int, int, int, int], parts: list[Part]) -> DeltaCase:
    key_heads, value_heads, head_dim, num_taps = heads
    state_ids = tuple(part.state_id for part in parts for _ in range(part.num_rows))
    return DeltaCase(key_heads, value_heads, head_dim, state_ids, num_taps)


def shaped_trees() -> list[list[Part]]:
    random = Random(5)
    shapes = (
        tuple(range(-1, 63)),
        tuple((i - 1) // 2 for i in range(63)),
        tuple(i - 2 + i % 2 if i > 1 else i - 1 for i in range(64)),
        (-1,) * 40,
        tuple(random.randint(max(-1, i - 5), i - 1) for i in range(64)),
    )
    return [[Part(3, 2), Part(2, len(shape), shape), Part(2, 1, (-1,)), Part(-1, 1)] for shape in shapes]


@pytest.fixture
def fast_instances(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Instances that the host compiles in reasonable time."""
    heads = ("32, 4", "64, 2", "128, 8")
    decode = [f"delta_decode<{head}, {trees}>" for head in heads for trees in ("false", "true")]
    monkeypatch.setattr(cuda, "DECODE", CudaProgram(cuda.DECODE.source, decode))
    monkeypatch.setattr(
        cuda, "REPLAY", CudaProgram(cuda.REPLAY.source, [f"delta_replay<{head}>" for head in heads])
    )
    return


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("fast_instances", "host")
@pytest.mark.parametrize("heads", [(2, 4, 32, 4), (1, 3, 64, 2), (1, 2, 128, 8)])
def test_batches_have_the_bits_of_the_definition(heads: tuple[int, int, int, int]) -> None:
    @settings(max_examples=12)
    @given(parts=some_parts(), seed=st.integers(0, 99))
    def check_all(parts: list[Part], seed: int) -> None:
        check(case_of(heads, parts), parts, seed)

    check_all()


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("fast_instances", "host")
@pytest.mark.parametrize("parts", shaped_trees())
def test_trees_of_every_shape(parts: list[Part], host: HostDevice) -> None:
    check(case_of((1, 2, 32, 4), parts), parts, seed=1)


SIGMOID_PARTS = [Part(3, 2), Part(2, 5, (-1, 0, 0, 1, 3)), Part(-1, 1), Part(1, 3)]


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("fast_instances", "host")
def test_an_output_gate_that_is_a_sigmoid() -> None:
    case = replace(case_of((2, 4, 32, 4), SIGMOID_PARTS), output_gate="sigmoid")
    check(case, SIGMOID_PARTS, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("is_prompt", [False, True])
def test_an_output_gate_that_is_a_sigmoid_on_a_gpu(is_prompt: bool) -> None:
    case = replace(case_of((2, 4, 128, 4), SIGMOID_PARTS), output_gate="sigmoid")
    check(case, SIGMOID_PARTS, seed=1, device="cuda", is_prompt=is_prompt)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 4, 32, 4), (1, 3, 64, 2), (16, 32, 128, 4)])
@pytest.mark.parametrize("is_prompt", [False, True])
def test_a_gpu_has_them_too(heads: tuple[int, int, int, int], is_prompt: bool) -> None:
    @settings(max_examples=20, deadline=None)
    @given(parts=some_parts(), seed=st.integers(0, 99))
    def check_all(parts: list[Part], seed: int) -> None:
        check(case_of(heads, parts), parts, seed, "cuda", is_prompt=is_prompt)

    check_all()


@pytest.mark.gpu
@pytest.mark.parametrize("parts", shaped_trees())
@pytest.mark.parametrize("is_prompt", [False, True])
def test_trees_of_every_shape_on_a_gpu(parts: list[Part], is_prompt: bool) -> None:
    check(case_of((2, 4, 128, 4), parts), parts, seed=1, device="cuda", is_prompt=is_prompt)


def test_trees_need_a_place_for_their_inputs() -> None:
    parts = [Part(0, 2, (-1, 0))]
    case = case_of((1, 2, 32, 4), parts)
    rows = rows_of(parts, None, Random(0))
    operands = DeltaNetInputs(*case.inputs(), rows)
    work = cuda.DecodeWorkspace(torch.zeros(2, 64), torch.zeros(100, dtype=torch.int32))
    with pytest.raises(ValueError, match="keep their inputs"):
        cuda.delta_net_decode_cuda(operands, case.weights(), *case.states(), None, None, work)


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("fast_instances", "host")
def test_chains_are_left_to_another_launch() -> None:
    parts = [Part(3, 2), Part(2, 4, (-1, 0, 0, 1)), Part(1, 1), Part(-1, 1)]
    case = case_of((2, 4, 32, 4), parts)
    found_kept, kept = kept_inputs(case), kept_inputs(case)
    states, expected_states = case.states(), case.states()
    tree = slice(2, 6)
    expected = torch.full((8, case.value_width), torch.nan)
    expected[tree] = gated_delta_net_batch(
        gated_delta_net_exact,
        DeltaNetInputs(*(tensor[:7] for tensor in case.inputs()), rows_of(parts[:3], kept, Random(0))),
        case.weights(),
        *expected_states,
    )[tree]
    operands = DeltaNetInputs(*case.inputs(), rows_of(parts, found_kept, Random(0)))
    out = torch.full_like(expected, torch.nan)
    arrivals = torch.zeros(cuda.arrival_count(8, 2, case.value_width), dtype=torch.int32)
    work = cuda.DecodeWorkspace(torch.full_like(out, torch.nan), arrivals)
    cuda.delta_net_decode_cuda(operands, case.weights(), *states, out, None, work, computes_chains=False)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    for found, untouched in zip(states, case.states(), strict=True):
        assert torch.equal(found, untouched)
    for found, wanted in zip(vars(found_kept).values(), vars(kept).values(), strict=True):
        assert torch.equal(found, wanted)


def committed_path(state_id: int, count: int, places: list[int]) -> CommittedPath:
    fill = [10**6] * (MAX_TREE_ROWS - len(places))
    return CommittedPath(*map(ints, ([state_id], [count], [0], [0] * MAX_TREE_ROWS, places + fill, [0])))


@pytest.mark.usefixtures("fast_instances", "host")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9, MAX_TREE_ROWS])
def test_a_commit_has_the_states_of_a_chain(count: int) -> None:
    case = case_of((2, 4, 32, 4), [Part(1, max(count, 1))])
    states, expected = case.states(), case.states()
    places = Random(count).sample(range(NUM_KEPT), count)
    kept = kept_inputs(case)
    qkv, _, alpha, beta = case.inputs()
    for values, place in ((qkv, kept.qkv), (alpha, kept.alpha), (beta, kept.beta)):
        place[places] = values[:count]
    if count:
        rows = Rows(torch.zeros(count, dtype=torch.int32), case.state_ids_tensor())
        gated_delta_net_exact(DeltaNetInputs(*case.inputs(), rows), case.weights(), *expected)
    readers = torch.zeros(1, 2, dtype=torch.int32)
    for path in (committed_path(-1, count, places), committed_path(1, count, places)):
        cuda.delta_net_replay_cuda([RecurrentLayer(case.weights(), *states, kept)], path, readers)
    assert not readers.any()
    for found, wanted in zip(states, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("fast_instances", "host")
@pytest.mark.parametrize("num_layers", [2, cuda.MOST_REPLAYED + 2])
def test_a_commit_advances_every_layer_by_its_own_inputs(num_layers: int) -> None:
    case, path = case_of((2, 4, 32, 4), [Part(1, 2)]), committed_path(1, 2, [7, 3])
    layers, alone = [], []
    for seed in range(num_layers):
        torch.manual_seed(seed)
        kept = KeptInputs(*(torch.randn_like(values) for values in vars(kept_inputs(case)).values()))
        weights = replace(case.weights(), a=-torch.rand(case.num_value_heads))
        states = [torch.randn_like(state) for state in case.states()]
        layers.append(RecurrentLayer(weights, *states, kept))
        alone.append(RecurrentLayer(weights, *(state.clone() for state in states), kept))
    readers = torch.zeros(num_layers, case.num_key_heads, dtype=torch.int32)
    cuda.delta_net_replay_cuda(layers, path, readers)
    ReferenceOps(exact=True).commit_delta_net(alone, path)
    assert not readers.any()
    for found, wanted in zip(layers, alone, strict=True):
        assert torch.equal(found.state, wanted.state)
        assert torch.equal(found.conv_state, wanted.conv_state)


def test_a_launch_without_anything_to_compute_is_refused() -> None:
    parts = [Part(0, 2)]
    case = case_of((1, 2, 32, 4), parts)
    operands = DeltaNetInputs(*case.inputs(), rows_of(parts, None, Random(0)))
    work = cuda.DecodeWorkspace(torch.zeros(2, 64), torch.zeros(100, dtype=torch.int32))
    with pytest.raises(ValueError, match="nothing is left to compute"):
        cuda.delta_net_decode_cuda(
            operands, case.weights(), *case.states(), None, None, work, computes_chains=False
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("conv_state", r"conv_state must be \[6, 3, 128\], not \[6, 2, 128\]"),
        ("qkv", r"kept qkv must be \[200, 128\], not \[200, 127\]"),
        ("beta", r"kept beta has strides"),
        ("kept", r"kept must be \[64\], not \[63\]"),
        ("readers", r"readers must be \[2, 1\], not \[1, 1\]"),
    ],
)
def test_a_commit_refuses_other_shapes(changed: str, message: str) -> None:
    case = case_of((1, 2, 32, 4), [Part(0, 1)])
    conv_state, state = case.states()
    kept, path = kept_inputs(case), committed_path(0, 0, [])
    readers = torch.zeros(1 if changed == "readers" else 2, 1, dtype=torch.int32)
    right = RecurrentLayer(case.weights(), *case.states(), kept)
    if changed == "conv_state":
        conv_state = conv_state[:, 1:]
    if changed == "qkv":
        kept = replace(kept, qkv=kept.qkv[:, 1:])
    if changed == "beta":
        kept = replace(kept, beta=kept.beta.T.contiguous().T)
    if changed == "kept":
        path = replace(path, kept=path.kept[1:])
    with pytest.raises(ValueError, match=message):
        cuda.delta_net_replay_cuda(
            [right, RecurrentLayer(case.weights(), conv_state, state, kept)], path, readers
        )
