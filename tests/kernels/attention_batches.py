"""Batches of chains and draft trees for the tests of attention over integers, on CPUs and on GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from random import Random
from typing import TypeVar, get_args

import torch
from cpu_cases import Output, Results
from deep_attention import random_rows
from hypothesis import strategies as st

from coldstream.kernels import _csrc
from coldstream.kernels.arithmetic.reference import empty_activations, quantize_activations
from coldstream.kernels.attention.arguments import (
    AttentionShape,
    DecodeWorkspace,
    IntegerQueries,
)
from coldstream.kernels.attention.cache_types import CACHE_TYPES, CacheType
from coldstream.kernels.attention.chunks import CHUNK_SIZE
from coldstream.kernels.attention.cuda import IntegerKernels, attend_in_parts
from coldstream.kernels.attention.exact import attention_exact, first_position
from coldstream.kernels.attention.merge_cuda import gates_of
from coldstream.kernels.attention.workspace_sizes import rows_at_once
from coldstream.kernels.cpu_ops import batch_rows
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.indexer.records import ChosenBlocks
from coldstream.kernels.ops import (
    BLOCK_POSITIONS,
    AttentionHeads,
    AttentionInputs,
    BatchRows,
    Caches,
    OutputGate,
    RopeSpec,
    Rows,
)
from coldstream.kernels.rope.reference import rope_angles

T = TypeVar("T")
# Devices on the host.
LIMITS = DeviceLimits(5, 99 << 10, 100 << 10)
WITH_WARPGROUPS = DeviceLimits(5, 227 << 10, 228 << 10, has_warpgroups=True)
MOST_POSITIONS = 3 * BLOCK_POSITIONS
GATES: tuple[OutputGate, ...] = get_args(OutputGate)


@dataclass(frozen=True)
class Part:
    """Rows of one sequence: behind `committed` positions a chain, or a draft tree of these parents."""

    committed: int
    num_rows: int
    parents: tuple[int, ...] | None = None

    @property
    def depths(self) -> list[int]:
        """Rows between each row and what is committed."""
        depths: list[int] = []
        for i in range(self.num_rows):
            parent = i - 1 if self.parents is None else self.parents[i]
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths


def line(num_rows: int) -> tuple[int, ...]:
    """The parents of a draft tree without forks."""
    return tuple(range(-1, num_rows - 1))


def random_tree(committed: int, num_rows: int, seed: int) -> Part:
    """Rows that mostly follow one of the last few."""
    random = Random(seed)
    return Part(committed, num_rows, tuple(random.randint(max(-1, i - 4), i - 1) for i in range(num_rows)))


@st.composite
def some_parts(draw: st.DrawFn, most_rows: int = 9) -> list[Part]:
    """Up to three sequences with up to `most_rows` rows each."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        committed = draw(st.sampled_from([0, 1, 40, 63, 64, 65, 191, 200, 255, 256, 300]))
        num_rows = draw(st.integers(1, most_rows))
        tree = tuple(draw(st.integers(-1, i - 1)) for i in range(num_rows))
        parents = draw(st.sampled_from([None, line(num_rows), tree, tree]))
        parts.append(Part(committed, num_rows, parents))
    return parts


def batch_of(
    parts: Sequence[Part], random: Random, is_deep: bool, most_positions: int = MOST_POSITIONS
) -> Rows:
    """Rows whose sequences have blocks in random order. is_deep decides who computes few of them on a GPU."""
    order = list(range(len(parts) * (most_positions // BLOCK_POSITIONS)))
    random.shuffle(order)
    values: list[list[int]] = [[], [], [], [], []]
    for number, part in enumerate(parts):
        start = len(values[0])
        for i, depth in enumerate(part.depths):
            parent = i - 1 if part.parents is None else part.parents[i]
            row = (part.committed + depth, number, part.committed + i)
            kept = -1 if part.parents is None else start + i
            for column, value in zip(
                values, (*row, start + parent if parent >= 0 else -1, kept), strict=True
            ):
                column.append(value)
    positions, segments, indices, parents, kept = (torch.tensor(v, dtype=torch.int32) for v in values)
    tables = torch.tensor(order, dtype=torch.int32).view(len(parts), -1)
    batch = BatchRows(
        segments, tables, indices, parents, kept,
        has_trees=bool((kept >= 0).any()),
        is_branching=any(part.parents not in (None, line(part.num_rows)) for part in parts),
        is_deep=is_deep,
    )  # fmt: skip
    return Rows(positions, segments, batch)


@dataclass(frozen=True)
class Kind:
    """What heads have of their own, apart from windows."""

    output_gate: OutputGate = "query"
    has_norms: bool = True
    v_norm: bool = False
    scale: float | None = None
    has_sinks: bool = False
    has_biases: bool = False  # not with gates of kind "query"


USUAL = Kind()


def some_kinds() -> st.SearchStrategy[Kind]:
    return st.builds(
        Kind,
        output_gate=st.sampled_from(GATES),
        has_norms=st.booleans(),
        v_norm=st.booleans(),
        scale=st.sampled_from([None, 1.0, 0.3]),
        has_sinks=st.booleans(),
        has_biases=st.booleans(),
    ).map(lambda kind: replace(kind, has_biases=kind.has_biases and kind.output_gate != "query"))


@dataclass(frozen=True)
class BatchCase:
    """Random rows over random caches, in which everything that no row sees is NaN."""

    parts: Sequence[Part]
    cache_name: str
    heads: tuple[int, int, int]  # of queries, of keys and values, and numbers in one
    window: int | None = None
    seed: int = 0
    most_positions: int = MOST_POSITIONS
    kind: Kind = USUAL
    is_deep: bool = True
    choice: tuple[int, float] | None = None  # positions of a block, and the share of blocks that rows see

    @property
    def cache_type(self) -> CacheType:
        return CACHE_TYPES[self.cache_name]

    def rows(self) -> Rows:
        return batch_of(self.parts, Random(self.seed), self.is_deep, self.most_positions)

    def inputs(self) -> AttentionInputs:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        num_heads, num_kv_heads, head_dim = self.heads
        positions = self.rows().positions
        num_rows = len(positions)
        gate_width = {"head": num_heads, "element": num_heads * head_dim}.get(self.kind.output_gate)
        return AttentionInputs(
            2 * random(num_rows, num_heads * (2 if self.kind.output_gate == "query" else 1) * head_dim),
            *(random(num_rows, num_kv_heads * head_dim) for _ in "kv"),
            rope_angles(positions, RopeSpec(16, 1e4)),
            None if gate_width is None else 3 * random(num_rows, gate_width),
            self.chosen(),
        )

    def chosen(self) -> ChosenBlocks | None:
        """Random blocks for each row, at least one that it sees."""
        if self.choice is None:
            return None
        (block_size, share), source = self.choice, Random(self.seed)
        positions, num_words = self.rows().positions, -(-self.most_positions // (32 * block_size))
        words = torch.zeros(len(positions), num_words, dtype=torch.int64)
        for row, position in enumerate(positions.tolist()):
            blocks = range(position // block_size + 1)
            for block in {source.choice(blocks), *(each for each in blocks if source.random() < share)}:
                words[row, block // 32] |= 1 << block % 32
        return ChosenBlocks(torch.where(words >= 1 << 31, words - (1 << 32), words).int(), block_size)

    def layer(self) -> AttentionHeads:
        generator = torch.Generator().manual_seed(self.seed + 1)
        kind = self.kind
        norms = [torch.randn(self.heads[2], generator=generator) + 1 for _ in "qk"]
        if not kind.has_norms:
            norms = [None, None]
        sinks = 3 * torch.randn(self.heads[0], generator=generator) + 2 if kind.has_sinks else None
        widths = [count * self.heads[2] for count in (self.heads[0], self.heads[1], self.heads[1])]
        biases = [torch.randn(width, generator=generator) if kind.has_biases else None for width in widths]
        return AttentionHeads(
            *norms,
            1e-6,
            kind.output_gate,
            self.window,
            scale=kind.scale,
            v_norm=kind.v_norm,
            q_bias=biases[0],
            k_bias=biases[1],
            v_bias=biases[2],
            sinks=sinks,
        )

    def caches(self) -> Caches:
        """In blocks; the rows' own places hold NaN too."""
        batch = self.rows().batch
        assert batch is not None
        _, num_kv_heads, head_dim = self.heads
        is_seen = torch.zeros(batch.tables.numel(), BLOCK_POSITIONS, dtype=torch.bool)
        for table, part in zip(batch.tables.long(), self.parts, strict=True):
            # A row at the least depth begins its window first.
            indices = torch.arange(first_position(part.committed, self.window), part.committed)
            is_seen[table[indices // BLOCK_POSITIONS], indices % BLOCK_POSITIONS] = True
        unseen = self.cache_type.encode(torch.full((num_kv_heads, head_dim), torch.nan))
        made = []
        for seed in (2 * self.seed, 2 * self.seed + 1):
            rows = random_rows(self.cache_name, tuple(is_seen.shape), num_kv_heads, head_dim, seed)
            rows[~is_seen] = unseen
            made.append(rows)
        return Caches(*made)

    def expected(self) -> Results:
        """The result [T, H · D] and both caches afterwards, by the definition."""
        caches = self.caches()
        out = attention_exact(self.inputs(), self.layer(), caches, self.rows())
        return out, caches.k, caches.v

    def on_cpu(self, runtime: _csrc.Runtime) -> Results:
        """The same by the C++ kernels."""
        caches = self.caches()
        return self.attend_on_cpu(runtime, caches), caches.k, caches.v

    def attend_on_cpu(self, runtime: _csrc.Runtime, caches: Caches) -> torch.Tensor:
        """The result alone, over these caches."""
        inputs, rows, chosen = self.inputs(), self.rows(), self.chosen()
        out = Output(len(rows.positions), self.heads[0] * self.heads[2])
        _csrc.attention(
            runtime, inputs.query_gate, inputs.key, inputs.value, inputs.angles, self.layer(),
            caches.k, caches.v, rows.positions, rows.state_ids, out.rows, batch_rows(rows.batch), inputs.gate,
            None if chosen is None else (chosen.words, chosen.block_size),
        )  # fmt: skip
        return out.checked()


def on(device: str, of: T) -> T:
    """The same tensors there."""
    if isinstance(of, torch.Tensor):
        return of.to(device)
    return replace(of, **{k: on(device, v) for k, v in vars(of).items()}) if is_dataclass(of) else of  # type: ignore[type-var, return-value]


def check_launched(case: BatchCase, expected: Results, limits: DeviceLimits, device: str = "cpu") -> None:
    """A GPU's kernels, from projections to what the next product reads, and what is left in the caches.

    With as many rows at once as a step has, and with all.
    """
    batch, num_rows = case.rows().batch, len(expected[0])
    assert batch is not None
    chosen = rows_at_once(num_rows, is_deep=batch.is_deep, has_trees=batch.has_trees)
    for at_once in sorted({chosen, num_rows}):
        _check_launched(case, expected, limits, device, at_once)


def _check_launched(
    case: BatchCase, expected: Results, limits: DeviceLimits, device: str, at_once: int
) -> None:
    out, *expected_caches = expected
    num_heads, num_kv_heads, head_dim = case.heads
    shape = AttentionShape(
        *(num_heads, num_kv_heads, head_dim, case.cache_type, case.kind.output_gate, case.kind.has_sinks),
        has_choice=case.choice is not None,
    )
    inputs, caches, rows = (on(device, each) for each in (case.inputs(), case.caches(), case.rows()))
    num_rows, width = out.shape
    kernels = IntegerKernels(shape, limits)
    empty = partial(torch.empty, device=device)
    queries = IntegerQueries(
        empty((num_rows, num_heads, 2, head_dim), dtype=torch.int8), empty(num_rows, num_heads), inputs.chosen
    )
    num_positions = CHUNK_SIZE * kernels.num_chunks(at_once, case.most_positions)
    sizes = DecodeWorkspace.shapes(shape, at_once, num_positions)
    workspace = DecodeWorkspace(*(empty(size) for size in sizes))
    # What attention does not write is not read either: an unseen chunk has no results.
    for part in vars(workspace).values():
        part.fill_(torch.nan)
    found, quantised = empty(num_rows, width), empty_activations(num_rows, width, torch.device(device))
    heads = on(device, case.layer())
    kernels.prepare(inputs, heads, caches, rows, queries)
    result = Activations(found, quantised)
    attend_in_parts(kernels, gates_of(inputs, heads), heads, caches, rows, queries, workspace, result)
    for cache, wanted in zip((caches.k, caches.v), expected_caches, strict=True):
        assert torch.equal(cache.cpu(), wanted)
    assert torch.equal(found.cpu(), out)
    padded = torch.nn.functional.pad(out, (0, quantised.q.shape[1] - width))
    for codes, wanted in zip(
        vars(quantised).values(), vars(quantize_activations(padded)).values(), strict=True
    ):
        assert torch.equal(codes.cpu(), wanted)
