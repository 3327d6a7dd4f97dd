"""Attention over integers as the GPU's kernels compute it, on the host: chunks have the definition's bits."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
from attention_batches import (
    LIMITS,
    MOST_POSITIONS,
    USUAL,
    WITH_WARPGROUPS,
    BatchCase,
    Kind,
    Part,
    batch_of,
    check_launched,
    line,
    random_tree,
    some_kinds,
    some_parts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.attention.arguments import AttentionShape, DecodeWorkspace, IntegerQueries
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.chunks import CHUNK_SIZE
from coldstream.kernels.attention.cuda import IntegerKernels
from coldstream.kernels.attention.exact import attend_chunk, first_position, grid_cells, heads_of
from coldstream.kernels.attention.exact_integers import NUM_PLANES
from coldstream.kernels.attention.planes import round_planes
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits
from coldstream.kernels.cuda.program import CudaProgram, Kernel
from coldstream.kernels.ops import BLOCK_POSITIONS, Caches, Rows
from coldstream.kernels.sequences import seen
from host_device import HostDevice


def is_deep(seed: int, limits: DeviceLimits) -> bool:
    """Warpgroups take decode's rows that are deep."""
    return limits.has_warpgroups or seed % 2 == 1


def check(
    parts: list[Part],
    cache_name: str,
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
    limits: DeviceLimits = LIMITS,
) -> None:
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    rows, (num_heads, num_kv_heads, head_dim) = batch_of(parts, random, is_deep(seed, limits)), heads
    cache_type, num_rows = CACHE_TYPES[cache_name], len(rows.positions)
    blocks = (len(parts) * MOST_POSITIONS // BLOCK_POSITIONS, BLOCK_POSITIONS, num_kv_heads)
    k, v = (cache_type.encode(torch.randn(*blocks, head_dim, generator=generator)) for _ in range(2))
    query = 3 * torch.randn(num_rows, num_heads, head_dim, generator=generator) / head_dim
    planes = round_planes(query, NUM_PLANES)
    codes = torch.stack((planes.high, planes.low), dim=-2).to(torch.int8)
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, cache_type)
    workspace = DecodeWorkspace(
        *(torch.full(size, torch.nan) for size in DecodeWorkspace.shapes(shape, num_rows, MOST_POSITIONS))
    )
    queries = IntegerQueries(codes, planes.scale)
    IntegerKernels(shape, limits).attend(queries, window, Caches(k, v), rows, workspace)
    for row, position in enumerate(rows.positions.tolist()):
        first = first_position(position, window)
        places = tuple(index[first:] for index in seen(rows, row))
        exact = heads_of(cache_type, query[row], k[places], v[places])
        cells = list(grid_cells(first, position + 1, BLOCK_POSITIONS))
        for chunk, cell in enumerate(cells):
            maximum, denominator, numerator = attend_chunk(exact, first, cell)
            found = workspace.stats[row, :, chunk]
            assert torch.equal(found[:, 0], maximum), (row, chunk)
            assert torch.equal(found[:, 1], denominator), (row, chunk)
            assert torch.equal(workspace.values[row, :, chunk], numerator), (row, chunk)
        assert workspace.stats[row, :, len(cells) :].isnan().all()
        assert workspace.values[row, :, len(cells) :].isnan().all()


def check_whole(
    parts: list[Part],
    cache_name: str,
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
    limits: DeviceLimits = LIMITS,
    device: str = "cpu",
    *,
    kind: Kind = USUAL,
) -> None:
    """From projections to what the next product reads, and what is left in the caches."""
    case = BatchCase(parts, cache_name, heads, window, seed, kind=kind, is_deep=is_deep(seed, limits))
    check_launched(case, case.expected(), limits, device)


@pytest.mark.sharded
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 32), (8, 1, 96)])
def test_chunks_have_the_bits_of_the_definition(cache_name: str, heads: tuple[int, int, int]) -> None:
    @settings(max_examples=8)
    @given(parts=some_parts(), window=st.sampled_from([None, None, 1, 60, 300]), seed=st.integers(0, 99))
    def check_all(parts: list[Part], window: int | None, seed: int) -> None:
        check(parts, cache_name, heads, window, seed)

    check_all()


def test_a_tree_of_64_rows_across_blocks(host: HostDevice) -> None:
    for committed in (0, 30, 250):
        check([random_tree(committed, 64, seed=4)], "i16", (4, 2, 64), None, seed=committed)


def test_the_heads_of_the_full_size_model(host: HostDevice) -> None:
    check([Part(70, 2), Part(5, 3, (-1, 0, 0))], "i16", (16, 2, 256), None, seed=1)
    check([Part(130, 1)], "i8", (16, 2, 256), 100, seed=2)
    check([Part(700, 1)], "i16", (16, 2, 256), None, seed=5)
    check([Part(130, 1), Part(90, 6, (-1, 0, 0, 2, 1, 4))], "i3", (16, 2, 256), None, seed=3)
    check([Part(200, 70)], "i4", (16, 2, 256), None, seed=4)


LARGEST = {
    "decode": ([Part(130, 1), Part(62, 3, line(3))], (16, 2, 512), None),
    "tree": ([Part(70, 2), Part(60, 5, (-1, 0, 0, 2, 2))], (16, 2, 512), None),
    "rows": ([Part(250, 40), Part(63, 1)], (2, 1, 512), None),
    "prompt": ([Part(230, 70)], (2, 1, 512), None),
    "windows": ([Part(300, 3), Part(0, 9, (-1, 0, 0, 1, 2, 2, 5, 6, 6))], (2, 1, 512), 100),
}
ROOMS = {"64K": replace(LIMITS, shared_per_block=64 << 10), "99K": LIMITS, "227K": WITH_WARPGROUPS}


@pytest.fixture(params=ROOMS.values(), ids=ROOMS)
def room(request: pytest.FixtureRequest, compiled_for_the_host: HostDevice) -> Iterator[DeviceLimits]:
    """A device on the host with so much shared memory for a block of threads."""
    with HostDevice(compiled_for_the_host.directory, limits=request.param).installed():
        yield request.param


@pytest.mark.sharded
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize("case", LARGEST.values(), ids=LARGEST)
def test_heads_of_512_have_the_bits_of_the_definition(
    cache_name: str, case: tuple[list[Part], tuple[int, int, int], int | None], room: DeviceLimits
) -> None:
    """Those of gemma4's layers without a window."""
    parts, heads, window = case

    @settings(max_examples=2)
    @given(st.integers(0, 99), some_kinds())
    def check_all(seed: int, kind: Kind) -> None:
        check_whole(parts, cache_name, heads, window, seed, room, kind=kind)

    check_all()


def test_chunks_of_rows_whose_windows_begin_at_different_depths(host: HostDevice) -> None:
    """Each row counts its chunks from its window's first one."""
    check([Part(700, 1), Part(70, 1), Part(300, 2)], "i16", (4, 2, 64), 300, seed=6)


@pytest.mark.sharded
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("cache_name", "heads"), [("i16", (4, 2, 128)), ("i8", (12, 1, 128)), ("i16", (16, 2, 256))]
)
def test_warpgroups_have_the_bits_of_the_definition(cache_name: str, heads: tuple[int, int, int]) -> None:
    """Merges of decode's rows, and of prompts, whose chunks are merged immediately."""

    @settings(max_examples=3)
    @given(parts=some_parts(), window=st.sampled_from([None, None, 1, 60, 300]), seed=st.integers(0, 99))
    def check_all(parts: list[Part], window: int | None, seed: int) -> None:
        parts = [
            Part(70, 4),
            *(replace(part, parents=part.parents and line(part.num_rows)) for part in parts),
        ]  # too many for the kernel of decode
        check(parts, cache_name, heads, window, seed, WITH_WARPGROUPS)

    check_all()
    for parts, window in (([Part(250, 70)], None), ([Part(0, 40), Part(300, 30), Part(700, 3)], 100)):
        check_whole(parts, cache_name, heads, window, 3, WITH_WARPGROUPS)


@pytest.mark.sharded
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 32), (5, 1, 96)])
def test_attention_has_the_bits_of_the_definition(cache_name: str, heads: tuple[int, int, int]) -> None:
    @settings(max_examples=5)
    @given(some_parts(), st.sampled_from([None, 60]), st.integers(0, 99), some_kinds())
    def check_all(parts: list[Part], window: int | None, seed: int, kind: Kind) -> None:
        check_whole(parts, cache_name, heads, window, seed, kind=kind)

    check_all()


PROMPTS = (
    ([Part(250, 70)], None),
    ([Part(0, 40), Part(300, 30, tuple(range(-1, 29))), Part(700, 3)], None),
    ([Part(500, 66)], 100),
)


@pytest.mark.sharded(9)
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize(("parts", "window"), PROMPTS)
def test_prompts_have_the_bits_of_the_definition(
    cache_name: str, parts: list[Part], window: int | None
) -> None:
    check_whole(parts, cache_name, (4, 2, 64), window, seed=3)


def with_zeros(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([rows, torch.zeros(count, *rows.shape[1:])])


def without_sequence(rows: Rows, num_padding: int) -> Rows:
    """`rows`, and behind them rows of no sequence."""

    def padded(column: torch.Tensor) -> torch.Tensor:
        return torch.cat([column, torch.full((num_padding,), -1, dtype=torch.int32)])

    assert rows.batch is not None
    names = ("segments", "indices", "parents", "kept")
    columns = {name: padded(getattr(rows.batch, name)) for name in names}
    return Rows(padded(rows.positions), padded(rows.state_ids), replace(rows.batch, **columns))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", ["i16", "i4"])
def test_what_computes_rows_of_no_sequence_first_leaves_nothing_of_them(cache_name: str) -> None:
    """The last rows come first, and blocks of threads take others after them."""
    case = BatchCase([Part(0, 448)], cache_name, (4, 2, 64), seed=1)
    shape = AttentionShape(4, 2, 64, CACHE_TYPES[cache_name])
    kernels, found = IntegerKernels(shape, LIMITS), []
    for num_padding in (0, 64):
        rows, caches = without_sequence(case.rows(), num_padding), case.caches()
        given = case.inputs()
        names = ("query_gate", "key", "value", "angles")
        more = {name: with_zeros(getattr(given, name), num_padding) for name in names}
        num_rows = len(rows.positions)
        queries = IntegerQueries(torch.empty(num_rows, 4, 2, 64, dtype=torch.int8), torch.empty(num_rows, 4))
        workspace = DecodeWorkspace(
            *(torch.empty(size) for size in DecodeWorkspace.shapes(shape, num_rows, CHUNK_SIZE))
        )
        kernels.prepare(replace(given, **more), case.layer(), caches, rows, queries)
        kernels.attend(queries, None, caches, rows, workspace)
        found.append((workspace.values[:448], workspace.stats[:448]))
    for alone, padded in zip(*found, strict=True):
        assert torch.equal(alone, padded)


def test_a_window_without_a_position_is_refused() -> None:
    case = BatchCase([Part(0, 3)], "i16", (4, 2, 64), seed=1)
    shape = AttentionShape(4, 2, 64, CACHE_TYPES["i16"])
    queries = IntegerQueries(torch.empty(3, 4, 2, 64, dtype=torch.int8), torch.empty(3, 4))
    workspace = DecodeWorkspace(*(torch.empty(size) for size in DecodeWorkspace.shapes(shape, 3, CHUNK_SIZE)))
    with pytest.raises(ValueError, match="a window of 0 positions holds nothing"):
        IntegerKernels(shape, LIMITS).attend(queries, 0, case.caches(), case.rows(), workspace)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize(
    "heads", [(4, 2, 64), (3, 3, 32), (5, 1, 96), (16, 2, 256), (16, 2, 512), (2, 1, 512)]
)
def test_a_gpu_has_them_too(cache_name: str, heads: tuple[int, int, int]) -> None:
    @settings(max_examples=20)
    @given(some_parts(), st.sampled_from([None, 60]), st.integers(0, 99), some_kinds())
    def check_all(parts: list[Part], window: int | None, seed: int, kind: Kind) -> None:
        given = cache_name, heads, window, seed, device_limits(), "cuda"
        check_whole(parts, *given, kind=kind)

    check_all()


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 32), (16, 2, 256), (16, 2, 512)])
@pytest.mark.parametrize(("parts", "window"), PROMPTS)
def test_a_gpu_has_those_of_prompts_too(
    cache_name: str, heads: tuple[int, int, int], parts: list[Part], window: int | None
) -> None:
    check_whole(parts, cache_name, heads, window, 3, device_limits(), "cuda")


@pytest.mark.parametrize(
    ("parents", "kernel"), [(line(3), "attention_integers_decode"), ((-1, 0, 0), "attention_integers<")]
)
def test_a_draft_without_forks_takes_the_kernel_of_chains(
    host: HostDevice, parents: tuple[int, ...], kernel: str
) -> None:
    """Its keys are in order of position, so that a draft of one token costs what two rows of a text do."""
    launched: list[str] = []
    kernel_of = CudaProgram.kernel

    def noted(program: CudaProgram, name: str) -> Kernel:
        launched.append(name)
        return kernel_of(program, name)

    with pytest.MonkeyPatch.context() as patch:  # undone before `host` is
        patch.setattr(CudaProgram, "kernel", noted)
        check([Part(70, 3, parents), Part(40, 2)], "i16", (4, 2, 64), None, seed=2)
    assert [name for name in launched if name.startswith(f"coldstream::{kernel}")] == launched != []
