"""Attention over integers as the GPU's kernels compute it, on the host: chunks have the definition's bits."""

from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from random import Random
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.attention.arguments import (
    AttentionInputs,
    AttentionShape,
    Caches,
    DecodeWorkspace,
    IntegerQueries,
)
from coldstream.kernels.attention.cache_layout import GPU_CACHE_TYPES
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.cuda import IntegerKernels
from coldstream.kernels.attention.exact import (
    CHUNK_SIZE,
    attend_chunk,
    attention_exact,
    first_position,
    grid_cells,
    heads_of,
)
from coldstream.kernels.attention.exact_integers import NUM_PLANES
from coldstream.kernels.attention.planes import round_planes
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits
from coldstream.kernels.ops import BLOCK_POSITIONS, BatchRows, RopeSpec, Rows
from coldstream.kernels.quantize.cuda import empty_activations
from coldstream.kernels.rope.reference import rope_angles
from coldstream.kernels.sequences import seen
from host_device import HostDevice

T = TypeVar("T")
LIMITS = DeviceLimits(5, 99 << 10, 100 << 10)
WITH_WARPGROUPS = DeviceLimits(5, 227 << 10, 228 << 10, has_warpgroups=True)
MOST_POSITIONS = 3 * BLOCK_POSITIONS


@dataclass(frozen=True)
class Part:
    """Rows of one sequence: behind `committed` positions a chain, or a draft tree of these parents."""

    committed: int
    num_rows: int
    parents: tuple[int, ...] | None = None


def batch_of(parts: list[Part], random: Random, limits: DeviceLimits) -> Rows:
    """Rows whose sequences have blocks in random order; warpgroups take few rows that are deep."""
    order = list(range(len(parts) * (MOST_POSITIONS // BLOCK_POSITIONS)))
    random.shuffle(order)
    values: list[list[int]] = [[], [], [], [], []]
    for number, part in enumerate(parts):
        start = len(values[0])
        depths: list[int] = []
        for i in range(part.num_rows):
            parent = i - 1 if part.parents is None else part.parents[i]
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            row = (part.committed + depths[i], number, part.committed + i)
            kept = -1 if part.parents is None else start + i
            for column, value in zip(
                values, (*row, start + parent if parent >= 0 else -1, kept), strict=True
            ):
                column.append(value)
    positions, segments, indices, parents, kept = (torch.tensor(v, dtype=torch.int32) for v in values)
    tables = torch.tensor(order, dtype=torch.int32).view(len(parts), -1)
    has_trees = bool((kept >= 0).any())
    is_deep = limits.has_warpgroups or random.random() < 0.5  # which decides who computes them
    batch = BatchRows(segments, tables, indices, parents, kept, has_trees=has_trees, is_deep=is_deep)
    return Rows(positions, segments, batch)


def check(
    parts: list[Part],
    cache_name: str,
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
    limits: DeviceLimits = LIMITS,
) -> None:
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    rows, (num_heads, num_kv_heads, head_dim) = batch_of(parts, random, limits), heads
    cache_type, num_rows = CACHE_TYPES[cache_name], len(rows.positions)
    blocks = (len(parts) * MOST_POSITIONS // BLOCK_POSITIONS, BLOCK_POSITIONS, num_kv_heads)
    k, v = (cache_type.encode(torch.randn(*blocks, head_dim, generator=generator)) for _ in range(2))
    query = 3 * torch.randn(num_rows, num_heads, head_dim, generator=generator) / head_dim
    planes = round_planes(query, NUM_PLANES)
    codes = torch.stack((planes.high, planes.low), dim=-2).to(torch.int8)
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, cache_type, window)
    workspace = DecodeWorkspace(
        *(torch.full(size, torch.nan) for size in DecodeWorkspace.shapes(shape, num_rows, MOST_POSITIONS))
    )
    IntegerKernels(shape, limits).attend(IntegerQueries(codes, planes.scale), Caches(k, v), rows, workspace)
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


def on(device: str, of: T) -> T:
    """The same tensors there."""
    if isinstance(of, torch.Tensor):
        return of.to(device)
    return replace(of, **{k: on(device, v) for k, v in vars(of).items()}) if is_dataclass(of) else of  # type: ignore[type-var, return-value]


def check_whole(
    parts: list[Part],
    cache_name: str,
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
    limits: DeviceLimits = LIMITS,
    device: str = "cpu",
    *,
    output_gate: bool = True,
) -> None:
    """From projections to what the next product reads, and what is left in the caches."""
    generator = torch.Generator().manual_seed(seed)
    rows, (num_heads, num_kv_heads, head_dim) = batch_of(parts, Random(seed), limits), heads
    cache_type, num_rows = CACHE_TYPES[cache_name], len(rows.positions)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    blocks = (len(parts) * MOST_POSITIONS // BLOCK_POSITIONS, BLOCK_POSITIONS, num_kv_heads)
    caches = Caches(*(cache_type.encode(random(*blocks, head_dim)) for _ in range(2)))
    expected_caches = Caches(caches.k.clone(), caches.v.clone())
    inputs = AttentionInputs(
        2 * random(num_rows, num_heads * (2 if output_gate else 1) * head_dim),
        *(random(num_rows, num_kv_heads * head_dim) for _ in "kv"),
        *(random(head_dim) + 1 for _ in "qk"), rope_angles(rows.positions, RopeSpec(16, 1e4)), 1e-6,
    )  # fmt: skip
    expected = attention_exact(
        inputs.query_gate, inputs.key, inputs.value, inputs.q_norm, inputs.k_norm, inputs.eps, inputs.angles,
        expected_caches.k, expected_caches.v, rows, window, output_gate=output_gate,
    )  # fmt: skip
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, cache_type, window, output_gate)
    kernels = IntegerKernels(shape, limits)
    empty = partial(torch.empty, device=device)
    queries = IntegerQueries(
        empty((num_rows, num_heads, 2, head_dim), dtype=torch.int8), empty(num_rows, num_heads)
    )
    workspace = DecodeWorkspace(
        *(
            empty(size)
            for size in DecodeWorkspace.shapes(
                shape, num_rows, CHUNK_SIZE * kernels.num_chunks(num_rows, MOST_POSITIONS)
            )
        )
    )
    width = num_heads * head_dim
    out, quantised = empty(num_rows, width), empty_activations(num_rows, width, torch.device(device))
    inputs, caches, rows = (on(device, each) for each in (inputs, caches, rows))
    kernels.prepare(inputs, caches, rows, queries)
    kernels.attend(queries, caches, rows, workspace)
    kernels.merge(inputs.query_gate, rows, workspace, out=out, quantised=quantised)
    assert torch.equal(caches.k.cpu(), expected_caches.k)
    assert torch.equal(caches.v.cpu(), expected_caches.v)
    assert torch.equal(out.cpu(), expected)
    padded = torch.nn.functional.pad(expected, (0, quantised.q.shape[1] - expected.shape[1]))
    for found, wanted in zip(
        vars(quantised).values(), vars(quantize_activations(padded)).values(), strict=True
    ):
        assert torch.equal(found.cpu(), wanted)


@st.composite
def some_parts(draw: st.DrawFn) -> list[Part]:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        committed = draw(st.sampled_from([0, 1, 40, 63, 64, 65, 191, 200, 255, 256, 300]))
        num_rows = draw(st.integers(1, 9))
        tree = draw(st.booleans())
        parents = tuple(draw(st.integers(-1, i - 1)) for i in range(num_rows)) if tree else None
        parts.append(Part(committed, num_rows, parents))
    return parts


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", GPU_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 32), (8, 1, 96)])
def test_chunks_have_the_bits_of_the_definition(cache_name: str, heads: tuple[int, int, int]) -> None:
    @settings(max_examples=8)
    @given(parts=some_parts(), window=st.sampled_from([None, None, 1, 60, 300]), seed=st.integers(0, 99))
    def check_all(parts: list[Part], window: int | None, seed: int) -> None:
        check(parts, cache_name, heads, window, seed)

    check_all()


def test_a_tree_of_64_rows_across_blocks(host: HostDevice) -> None:
    random = Random(4)
    parents = tuple(random.randint(max(-1, i - 4), i - 1) for i in range(64))
    for committed in (0, 30, 250):
        check([Part(committed, 64, parents)], "i16", (4, 2, 64), None, seed=committed)


def test_the_heads_of_the_full_size_model(host: HostDevice) -> None:
    check([Part(70, 2), Part(5, 3, (-1, 0, 0))], "i16", (16, 2, 256), None, seed=1)
    check([Part(130, 1)], "i8", (16, 2, 256), 100, seed=2)
    check([Part(130, 1), Part(90, 6, (-1, 0, 0, 2, 1, 4))], "i3", (16, 2, 256), None, seed=3)
    check([Part(200, 70)], "i4", (16, 2, 256), None, seed=4)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("cache_name", "heads"), [("i16", (4, 2, 128)), ("i8", (12, 1, 128)), ("i16", (16, 2, 256))]
)
def test_warpgroups_have_the_bits_of_the_definition(cache_name: str, heads: tuple[int, int, int]) -> None:
    """Merges of few rows, and of prompts, whose chunks are merged immediately."""

    @settings(max_examples=3)
    @given(parts=some_parts(), window=st.sampled_from([None, None, 1, 60, 300]), seed=st.integers(0, 99))
    def check_all(parts: list[Part], window: int | None, seed: int) -> None:
        parts = [
            Part(70, 4),
            *(replace(part, parents=None) for part in parts),
        ]  # too many for the kernel of few
        check(parts, cache_name, heads, window, seed, WITH_WARPGROUPS)

    check_all()
    for parts, window in (([Part(250, 70)], None), ([Part(0, 40), Part(300, 30), Part(700, 3)], 100)):
        check_whole(parts, cache_name, heads, window, 3, WITH_WARPGROUPS)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", GPU_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 32), (5, 1, 96)])
def test_attention_has_the_bits_of_the_definition(cache_name: str, heads: tuple[int, int, int]) -> None:
    @settings(max_examples=5)
    @given(some_parts(), st.sampled_from([None, 60]), st.integers(0, 99), st.booleans())
    def check_all(parts: list[Part], window: int | None, seed: int, output_gate: bool) -> None:
        check_whole(parts, cache_name, heads, window, seed, output_gate=output_gate)

    check_all()


MANY = (
    ([Part(250, 70)], None),
    ([Part(0, 40), Part(300, 30, tuple(range(-1, 29))), Part(700, 3)], None),
    ([Part(500, 66)], 100),
)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", GPU_CACHE_TYPES)
@pytest.mark.parametrize(("parts", "window"), MANY)
def test_many_rows_have_the_bits_of_the_definition(
    cache_name: str, parts: list[Part], window: int | None
) -> None:
    check_whole(parts, cache_name, (4, 2, 64), window, seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", GPU_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 32), (5, 1, 96), (16, 2, 256)])
def test_a_gpu_has_them_too(cache_name: str, heads: tuple[int, int, int]) -> None:
    @settings(max_examples=20)
    @given(some_parts(), st.sampled_from([None, 60]), st.integers(0, 99), st.booleans())
    def check_all(parts: list[Part], window: int | None, seed: int, output_gate: bool) -> None:
        given = cache_name, heads, window, seed, device_limits(), "cuda"
        check_whole(parts, *given, output_gate=output_gate)

    check_all()


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", GPU_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 32), (16, 2, 256)])
@pytest.mark.parametrize(("parts", "window"), MANY)
def test_a_gpu_has_those_of_many_rows_too(
    cache_name: str, heads: tuple[int, int, int], parts: list[Part], window: int | None
) -> None:
    check_whole(parts, cache_name, heads, window, 3, device_limits(), "cuda")
