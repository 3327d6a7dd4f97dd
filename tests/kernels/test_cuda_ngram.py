"""The n-gram embedding by the GPU's kernels, on the host and on a GPU: the bits of the definition."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
from cuda_row_cases import CUDA, GuardedActivations, check_compiles, for_each_architecture, random, spiky
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_blocks import random_weight
from same_bits import assert_same_bits
from state_boundaries import Chain, some_chains
from state_boundaries import rows_of as rows_of_chains

from all_pairs import all_pairs
from coldstream.errors import GenerationFault
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import calls
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.hyper_connections.cuda import norm_streams_cuda
from coldstream.kernels.hyper_connections.reference import norm_streams_exact
from coldstream.kernels.ngram.cuda import (
    MOST_WAITING_BLOCKS,
    PROGRAM,
    ROWS_PROGRAM,
    instance_of,
    ngram_commit_cuda,
    ngram_conv_cuda,
    ngram_gate_cuda,
    ngram_ids_cuda,
    ngram_rows_cuda,
)
from coldstream.kernels.ngram.mailbox import NgramMailbox
from coldstream.kernels.ngram.reference import (
    commit_ngram,
    ngram_conv_exact,
    ngram_gate_exact,
    ngram_ids,
)
from coldstream.kernels.ops import BatchRows, CommittedPath, NgramHash, NgramState, Rows
from coldstream.kernels.quant_tensor import QuantTensor

CPU, EPS, NUM_STATES, NUM_KEPT, END, NUM_ROWS = torch.device("cpu"), 1e-6, 8, 20, 5, 100
SOME_TYPES = QuantType.Q5_0, QuantType.F16, QuantType.Q4_K, QuantType.IQ4_NL
HASHES = {
    2: NgramHash((2**63 - 25, 2**62 + 135), (2**31 - 1,), (0,), END, 1),
    3: NgramHash((2**40 + 15, 2**39 + 7, 2**38 + 1), (11, 13, 17, 19), (0, 11, 24, 41), END, 2),
    4: NgramHash((7, 2**50 + 1, 3, 2**61 - 1), (97, 101, 10**6), (0, 97, 198), END, 1),
}


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels run, and arrays lie."""
    if request.param == "gpu":
        calls.attach()
        return CUDA
    monkeypatch.setattr(request.getfixturevalue("host"), "keeps_time", True)  # a thread of it answers
    return CPU


@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)
    check_compiles(CudaProgram(ROWS_PROGRAM.source, [*map(instance_of, SOME_TYPES)]), arch)


@dataclass(frozen=True)
class Step:
    """Chains, then at most one draft tree, then rows of no sequence. parents: of the tree, −1 its root's."""

    chains: list[Chain]
    parents: tuple[int, ...] = ()
    padding: int = 0

    @property
    def num_chained(self) -> int:
        return sum(chain.num_rows for chain in self.chains)

    @property
    def num_real(self) -> int:
        return self.num_chained + len(self.parents)

    def rows(self) -> Rows:
        """Of the sequences; the tree is the last state's, and its row i is kept at NUM_KEPT − 1 − i."""
        rows, start, count = rows_of_chains(self.chains), self.num_chained, len(self.parents)
        assert rows.batch is not None

        def joined(values: torch.Tensor, *more: int) -> torch.Tensor:
            return torch.cat((values, torch.tensor(more, dtype=torch.int32)))

        batch = BatchRows(
            joined(rows.batch.segments, *[len(self.chains)] * count),
            rows.batch.tables,
            torch.zeros(self.num_real, dtype=torch.int32),
            joined(rows.batch.parents, *(-1 if p < 0 else start + p for p in self.parents)),
            joined(rows.batch.kept, *(NUM_KEPT - 1 - i for i in range(count))),
            has_trees=bool(self.parents),
        )
        state_ids = joined(rows.state_ids, *[NUM_STATES - 1] * count)
        return Rows(torch.zeros_like(state_ids), state_ids, batch)

    def padded(self, device: torch.device) -> Rows:
        """With rows of no sequence behind, on a device."""

        def there(values: torch.Tensor) -> torch.Tensor:
            return torch.cat((values, torch.full((self.padding,), -1, dtype=torch.int32))).to(device)

        rows = self.rows()
        assert rows.batch is not None
        names = ("segments", "indices", "parents", "kept")
        batch = replace(rows.batch, **{name: there(getattr(rows.batch, name)) for name in names})
        return Rows(there(rows.positions), there(rows.state_ids), batch)


def trees() -> st.SearchStrategy[tuple[int, ...]]:
    return st.integers(0, 12).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n))))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    chains, parents = draw(some_chains(NUM_STATES - 1)), draw(trees())
    if not chains and not parents:
        chains = [Chain(1, (2,))]
    return Step(chains, parents, draw(st.integers(0, 3)))


STEPS = [
    Step([Chain(1, (2,))]),
    Step([Chain(1, (2,)), Chain(2, (0,))], padding=2),
    Step([Chain(40, (1, 4), (17,)), Chain(3, (0,))], (-1, 0, 0, 2, 1), padding=1),
    Step([], (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)),
    Step([], (-1, -1, 0, 1)),
]
some_steps = pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))


def tokens_of(step: Step, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (step.num_real,), generator=numbers, dtype=torch.int32)


def state_of(context: int = 2, history: int = 9, width: int = 8) -> NgramState:
    tokens = torch.randint(0, 9, (NUM_STATES, context), generator=torch.Generator().manual_seed(3))
    conv, kept_rows = random(4, NUM_STATES, history, width), random(5, NUM_KEPT, width)
    return NgramState(tokens.int(), conv, torch.zeros(NUM_KEPT, dtype=torch.int32), kept_rows)


def on(device: torch.device, state: NgramState) -> NgramState:
    return NgramState(*(values.clone().to(device) for values in vars(state).values()))


def assert_states_equal(found: NgramState, expected: NgramState) -> None:
    for name, values in vars(expected).items():
        assert_same_bits(getattr(found, name).cpu(), values)


def check_ids(step: Step, length: int, device: torch.device, seed: int = 0) -> None:
    hashing, token_ids = HASHES[length], tokens_of(step, seed)
    expected_state = state_of(length - 1)
    state = on(device, expected_state)
    expected = ngram_ids(token_ids, hashing, expected_state, step.rows())
    box = NgramMailbox.create(step.num_real + step.padding + 1, len(hashing.sizes), 8, QuantType.F32)
    box.ids.numpy()[:] = -7
    box.done.numpy()[:] = 1, 0
    padded = torch.cat((token_ids, torch.zeros(step.padding, dtype=torch.int32))).to(device)
    ngram_ids_cuda(padded, hashing, state, step.padded(device), box)
    if device == CUDA:
        torch.cuda.synchronize()
    found = torch.from_numpy(box.ids.numpy())
    assert torch.equal(found[: step.num_real], expected)
    assert (found[step.num_real : -1] == -1).all()
    assert (found[-1] == -7).all()
    assert_states_equal(state, expected_state)
    assert box.request.numpy()[0] == step.num_real + step.padding
    assert box.done.numpy().tolist() == [0, 0]


@some_steps
@pytest.mark.parametrize("length", HASHES)
def test_ids_are_those_of_the_definition(step: Step, length: int, device: torch.device) -> None:
    check_ids(step, length, device)


@pytest.mark.usefixtures("host")
@settings(max_examples=40, deadline=None)
@given(step=steps(), length=st.sampled_from(sorted(HASHES)), seed=st.integers(0, 99))
def test_ids_of_any_step(step: Step, length: int, seed: int) -> None:
    check_ids(step, length, CPU, seed)


@pytest.mark.gpu
def test_ids_of_a_long_prompt_on_a_gpu() -> None:
    check_ids(Step([Chain(8000, (1, 4), (5001,)), Chain(100, (0,))], padding=92), 3, CUDA)


@all_pairs(size=[8, 24, 256, 1000], num_streams=[2, 4], rows=[1, 3, 70])
def test_a_gate_has_the_bits_of_the_definition(
    size: int, num_streams: int, rows: int, device: torch.device
) -> None:
    key, query = spiky(1, rows, num_streams * size), random(2, rows, num_streams * size)
    value = random(3, rows, size)
    key[0] = 0  # whose gate has no sign
    out = Guarded(rows, num_streams * size, device=device)
    ngram_gate_cuda(key.to(device), query.to(device), value.to(device), out.tensor)
    assert_same_bits(out.checked(), ngram_gate_exact(key, query, value))


@all_pairs(size=[8, 72, 256], num_streams=[2, 4, 8], rows=[1, 3, 65])
def test_norms_of_streams(size: int, num_streams: int, rows: int, device: torch.device) -> None:
    width = num_streams * size
    x, weight = spiky(1, rows, width), random(2, width)
    out, codes = Guarded(rows, width, device=device), GuardedActivations(rows, width, device)
    norm_streams_cuda(x.to(device), num_streams, weight.to(device), EPS, out.tensor, codes.out)
    expected = norm_streams_exact(x, weight, EPS, size)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)


def check_conv(step: Step, taps: tuple[int, int], width: int, device: torch.device) -> None:
    num_taps, dilation = taps
    expected_state = state_of(2, (num_taps - 1) * dilation, width)
    state, weights = on(device, expected_state), random(6, width, num_taps)
    parts = [random(seed, step.num_real + step.padding, width) for seed in (1, 2, 3)]
    real = [part[: step.num_real] for part in parts]
    expected = ngram_conv_exact(*real, weights, dilation, expected_state, step.rows())
    out = Guarded(*parts[0].shape, device=device)
    there = [part.to(device) for part in parts]
    ngram_conv_cuda(*there, weights.to(device), dilation, state, step.padded(device), out.tensor)
    found = out.checked()
    assert_same_bits(found[: step.num_real], expected)
    assert torch.isfinite(found).all()
    assert_same_bits(state.conv.cpu(), expected_state.conv)
    assert_same_bits(state.kept_rows.cpu(), expected_state.kept_rows)


@some_steps
@pytest.mark.parametrize(("taps", "width"), [((4, 3), 200), ((2, 1), 7), ((5, 4), 130), ((3, 8), 16)])
def test_a_convolution_has_the_bits_of_the_definition(
    step: Step, taps: tuple[int, int], width: int, device: torch.device
) -> None:
    check_conv(step, taps, width, device)


@pytest.mark.usefixtures("host")
@settings(max_examples=30, deadline=None)
@given(step=steps(), taps=st.sampled_from([(4, 3), (2, 2), (5, 4), (6, 3)]))
def test_a_convolution_of_any_step(step: Step, taps: tuple[int, int]) -> None:
    check_conv(step, taps, 9, CPU)


@pytest.mark.gpu
def test_a_convolution_of_a_long_prompt_on_a_gpu() -> None:
    check_conv(Step([Chain(600, (1, 4), (333,)), Chain(20, (0,))], padding=4), (4, 3), 10240, CUDA)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_a_commit_leaves_the_states_of_a_chain(count: int, device: torch.device) -> None:
    expected = state_of(width=300)
    kept_tokens = torch.arange(NUM_KEPT, dtype=torch.int32) + 1
    expected = replace(expected, kept_tokens=kept_tokens)
    found = on(device, expected)
    kept = torch.randperm(NUM_KEPT, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    numbers = [torch.tensor([number], dtype=torch.int32) for number in (3, count, 0)]
    path = CommittedPath(*numbers, kept, kept, kept)
    commit_ngram(expected, path)
    there = CommittedPath(*(each.to(device) for each in vars(path).values() if each is not None))
    ngram_commit_cuda(found, there)
    assert_states_equal(found, expected)


@dataclass(frozen=True)
class Table:
    """Random rows of a type, in a file, and their values."""

    rows: _csrc.NgramTable
    weight: QuantTensor

    @classmethod
    def written(cls, path: Path, quant_type: QuantType) -> Self:
        cols = max(32, quant_type.block_elements)
        weight = random_weight(quant_type, (NUM_ROWS, cols), seed=1)
        path.write_bytes(weight.blocks.numpy().tobytes())
        row_bytes = quant_type.row_bytes(cols)
        with path.open("rb") as file:
            rows = _csrc.NgramTable(file.fileno(), 0, quant_type, NUM_ROWS, cols, row_bytes, 1 << 20)
        return cls(rows, weight)

    def values(self, ids: NDArray[np.int32]) -> torch.Tensor:
        """Of the rows, side by side; zeros for row −1."""
        found = dequantize(self.weight)[torch.from_numpy(np.maximum(ids, 0))]
        found[torch.from_numpy(ids) < 0] = 0
        return found.reshape(len(ids), -1)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table.written(tmp_path / "table", QuantType.Q8_0)


@dataclass(frozen=True)
class Served:
    box: NgramMailbox
    server: _csrc.NgramServer


def serve(table: Table, rows: int, heads: int) -> Served:
    box = NgramMailbox.create(rows, heads, table.weight.shape[1], table.weight.quant_type)
    server = _csrc.NgramServer(_csrc.Runtime(2), *box.arrays(), table.rows)
    server.begin()
    return Served(box, server)


def check_rows(table: Table, rows: int, heads: int, device: torch.device) -> None:
    """Twice: from the file, and from memory."""
    served, width = serve(table, rows, heads), heads * table.weight.shape[1]
    ids = np.random.default_rng(rows).integers(-1, NUM_ROWS, (rows, heads)).astype(np.int32)
    ids[0, 0] = -1
    box, expected = served.box, table.values(ids)
    for _ in range(2):
        box.ids.numpy()[:], box.found.numpy()[:] = ids, 255
        box.done.numpy()[0] = 0
        box.request.numpy()[0] = rows
        out, codes = Guarded(rows, width, device=device), GuardedActivations(rows, width, device)
        ngram_rows_cuda(box, out.tensor, codes.out)
        found = out.checked()
        assert torch.equal(found, expected)
        found[expected == 0] = expected[expected == 0]  # zeros for no row may have a sign
        assert_same_bits(found, expected)
        codes.check(expected)
    served.server.check()
    box.check()
    assert table.rows.hits > 0
    served.server.end()


@pytest.mark.parametrize("rows", [1, 3, MOST_WAITING_BLOCKS + 1])
def test_rows_that_the_host_reads(table: Table, rows: int, device: torch.device) -> None:
    """Few are read by the thread that looks for requests, many by all."""
    check_rows(table, rows, 2 + 2 * (rows == 1), device)


@pytest.mark.parametrize("quant_type", SOME_TYPES, ids=lambda found: found.name)
def test_rows_of_other_types(quant_type: QuantType, tmp_path: Path, device: torch.device) -> None:
    check_rows(Table.written(tmp_path / "table", quant_type), 2, 5, device)


@pytest.mark.usefixtures("host")
def test_errors_of_a_request_are_those_of_the_check(table: Table) -> None:
    served = serve(table, 1, 1)
    box = served.box
    outside = "a row lies outside the table"
    for rows, row, message in ((1, NUM_ROWS, outside), (2, 0, "n-grams of 2 rows, which")):
        box.ids.numpy()[0], box.done.numpy()[0] = row, 0
        box.request.numpy()[0] = rows
        while not box.done.numpy()[0]:
            pass
        with pytest.raises(ValueError, match=message):
            served.server.check()
    served.server.check()
    box.check()
    box.done.numpy()[1] = 1
    with pytest.raises(GenerationFault, match="rows of n-grams were not read in time"):
        box.check()


@pytest.mark.usefixtures("host")
def test_what_no_kernel_has_is_refused() -> None:
    box, rows = NgramMailbox.create(4, 4, 8, QuantType.F32), STEPS[0].padded(CPU)
    state, one = state_of(), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="no kernel for n-grams of 5 tokens with 1 heads"):
        ngram_ids_cuda(one, NgramHash((1,) * 5, (7,), (0,), END, 1), state, rows, box)
    with pytest.raises(ValueError, match=r"the state must be \[8, 3\]"):
        ngram_ids_cuda(one, HASHES[4], state, rows, box)
    with pytest.raises(ValueError, match="5 rows for a mailbox of 4"):
        ngram_ids_cuda(torch.zeros(5, dtype=torch.int32), HASHES[3], state, rows, box)
    x = torch.zeros(1, 8)
    with pytest.raises(ValueError, match="no kernel for a convolution over 6 rows 4 apart"):
        ngram_conv_cuda(x, x, x, torch.zeros(8, 6), 4, state, rows, x)
    tree, four = STEPS[4].padded(CPU), torch.zeros(4, 8)
    without = replace(state, kept_tokens=None, kept_rows=None)
    with pytest.raises(ValueError, match="rows of draft trees need a place"):
        ngram_conv_cuda(four, four, four, torch.zeros(8, 4), 3, without, tree, four)
    with pytest.raises(ValueError, match="whole streams, of a multiple of 4 each"):
        ngram_gate_cuda(x, x, torch.zeros(1, 2), x)
    with pytest.raises(ValueError, match=r"rows \[1, 8\] from a mailbox"):
        ngram_rows_cuda(box, x, GuardedActivations(1, 8, CPU).out)
