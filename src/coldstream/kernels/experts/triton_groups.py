"""Routed experts of many tokens on the device: pairs grouped by expert, products on tensor cores."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.arithmetic.triton import GROUP_SIZE, SUMS_PER_GROUP
from coldstream.kernels.experts.triton import ExpertMatrices
from coldstream.kernels.linear.triton import NUM_STAGES, num_units
from coldstream.kernels.linear.triton_products import tile_products

TILE_ROWS = 64
NUM_WARPS = 4
SCAN_SIZE = 1024  # pairs that a program looks at together


@dataclass(frozen=True)
class PairGroups:
    """P pairs in the order of their experts, cut into tiles of `tile_pairs`; the memory is the caller's.

    counts [experts]; pairs [P]; tiles [max_tiles, 3]: expert, first place and end in `pairs`; num_tiles [1]:
    all int32. See `choose_tile_pairs` and `max_tiles`.
    """

    tile_pairs: int
    counts: torch.Tensor
    pairs: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor


def choose_tile_pairs(num_pairs: int, num_experts: int) -> int:
    """How many pairs of one expert a program takes: fewer where most experts have few."""
    return 16 if num_pairs <= 16 * num_experts else 32


def max_tiles(num_pairs: int, num_experts: int) -> int:
    """No routing of `num_pairs` pairs needs more tiles."""
    return num_pairs // choose_tile_pairs(num_pairs, num_experts) + min(num_pairs, num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(
    topk_ids, first_table, second_table, third_table, counts, num_pairs, SCAN: tl.constexpr
):
    """One program: the pairs of expert program_id(0), or none if an address of its is 0."""
    expert = tl.program_id(0)
    found = tl.zeros((SCAN,), tl.int32)
    for first in range(0, num_pairs, SCAN):
        at = first + tl.arange(0, SCAN)
        ids = tl.load(topk_ids + at, mask=at < num_pairs, other=-1)
        found += (ids == expert).to(tl.int32)
    is_here = (tl.load(first_table + expert) != 0) & (tl.load(second_table + expert) != 0)
    is_here &= tl.load(third_table + expert) != 0
    tl.store(counts + expert, tl.where(is_here, tl.sum(found, axis=0), 0))


@triton.jit(do_not_specialize=["num_pairs"])
def group_pairs_kernel(
    topk_ids,
    counts,
    pairs,
    tiles,
    num_tiles,
    num_pairs,
    num_experts,
    PAIRS: tl.constexpr,
    SCAN: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One program: the places of the pairs of expert program_id(0), in ascending order, and their tiles."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    count_of = tl.load(counts + other, mask=other < num_experts, other=0)
    tiles_of = (count_of + PAIRS - 1) // PAIRS
    begin = tl.sum(tl.where(other < expert, count_of, 0), axis=0)
    first_tile = tl.sum(tl.where(other < expert, tiles_of, 0), axis=0)
    count = tl.load(counts + expert)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles_of, axis=0))
    for tile in range((count + PAIRS - 1) // PAIRS):
        entry = tiles + (first_tile + tile) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, begin + tile * PAIRS)
        tl.store(entry + 2, begin + tl.minimum(count, (tile + 1) * PAIRS))
    if count > 0:
        place = begin
        for first in range(0, num_pairs, SCAN):
            at = first + tl.arange(0, SCAN)
            is_mine = tl.load(topk_ids + at, mask=at < num_pairs, other=-1) == expert
            rank = tl.cumsum(is_mine.to(tl.int32), axis=0)
            tl.store(pairs + place + rank - 1, at, mask=is_mine)
            place += tl.sum(is_mine.to(tl.int32), axis=0)


@triton.jit
def tile_of_expert(
    addresses, expert, n, row_bytes, q, scales, sums, num_cols, row, num_groups, MATRIX: tl.constexpr
):
    """Rows n of an expert's matrix times the rows `row` of activations: float32 [N, T]."""
    return tile_products(
        tl.load(addresses + expert).to(tl.pointer_type(tl.uint8)),
        n,
        row_bytes,
        q + row * num_groups * GROUP_SIZE,
        scales + row * num_groups,
        sums + row * num_groups * SUMS_PER_GROUP,
        num_cols,
        MATRIX[0],
        MATRIX[1],
        MATRIX[2],
        MATRIX[3],
        MATRIX[4],
    )


@triton.jit
def grouped_kernel(
    pairs,
    tiles,
    num_tiles,
    addresses,
    up_addresses,
    q,
    scales,
    sums,
    out,
    pairs_per_row,
    num_rows,
    row_bytes,
    up_row_bytes,
    num_cols,
    num_groups,
    MATRIX: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program: ROWS outputs for the pairs of tile program_id(1), or with UP those of gate and up."""
    tile = tl.program_id(1)
    if tile < tl.load(num_tiles):
        expert, begin, end = (
            tl.load(tiles + tile * 3),
            tl.load(tiles + tile * 3 + 1),
            tl.load(tiles + tile * 3 + 2),
        )
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        existing = tl.minimum(n, num_rows - 1)
        place = begin + tl.arange(0, PAIRS)
        pair = tl.load(pairs + tl.minimum(place, end - 1)).to(tl.int64)
        row = pair // pairs_per_row
        y = tile_of_expert(
            addresses, expert, existing, row_bytes, q, scales, sums, num_cols, row, num_groups, MATRIX
        )
        if UP is not None:
            up = tile_of_expert(
                up_addresses, expert, existing, up_row_bytes, q, scales, sums, num_cols, row, num_groups, UP
            )
            y = arithmetic.swiglu(y, up)
        is_valid = (n < num_rows)[:, None] & (place < end)[None, :]
        tl.store(out + pair[None, :] * num_rows + n[:, None], y, mask=is_valid)


def group_pairs(
    topk_ids: torch.Tensor, gate: ExpertMatrices, up: ExpertMatrices, down: ExpertMatrices, groups: PairGroups
) -> None:
    """Writes `groups` for contiguous int32 `topk_ids` [T, K]: two launches.

    Pairs of an expert are adjacent and ascend, and so do experts. Pairs whose expert has an address 0 in any
    table are in no tile.
    """
    num_pairs, num_experts = topk_ids.numel(), len(gate.addresses)
    tables = (gate.addresses, up.addresses, down.addresses)
    count_pairs_kernel[(num_experts,)](topk_ids, *tables, groups.counts, num_pairs, SCAN=SCAN_SIZE)
    group_pairs_kernel[(num_experts,)](
        topk_ids,
        groups.counts,
        groups.pairs,
        groups.tiles,
        groups.num_tiles,
        num_pairs,
        num_experts,
        PAIRS=groups.tile_pairs,
        SCAN=SCAN_SIZE,
        EXPERTS=triton.next_power_of_2(num_experts),
    )


def experts_gate_up_grouped(
    x: QuantActivations,
    num_ranks: int,
    gate: ExpertMatrices,
    up: ExpertMatrices,
    groups: PairGroups,
    out: torch.Tensor,
) -> None:
    """Writes silu(gate_e x) · (up_e x) of every grouped pair to contiguous float32 `out` [T · K, F].

    x has a row for each of T tokens, which have `num_ranks` pairs each; gate and up are of integer types.
    """
    _launch(x, num_ranks, gate, up, groups, out)


def experts_down_grouped(
    x: QuantActivations, down: ExpertMatrices, groups: PairGroups, out: torch.Tensor
) -> None:
    """Writes down_e x of every grouped pair to contiguous float32 `out` [T, K, E]; x has a row per pair."""
    _launch(x, 1, down, None, groups, out)


def tile_constants(matrices: ExpertMatrices) -> tuple[int, ...]:
    """What `tile_products` knows about a matrix at compile time, in its order."""
    return (*matrices.geometry.constants.values(), num_units(matrices.geometry))


def _launch(
    x: QuantActivations,
    pairs_per_row: int,
    matrices: ExpertMatrices,
    up: ExpertMatrices | None,
    groups: PairGroups,
    out: torch.Tensor,
) -> None:
    if len(groups.tiles) == 0:
        return
    grouped_kernel[(triton.cdiv(matrices.num_rows, TILE_ROWS), len(groups.tiles))](
        groups.pairs,
        groups.tiles,
        groups.num_tiles,
        matrices.addresses,
        None if up is None else up.addresses,
        x.q,
        x.scales,
        x.sums,
        out,
        pairs_per_row,
        matrices.num_rows,
        matrices.geometry.row_bytes,
        None if up is None else up.geometry.row_bytes,
        matrices.num_cols,
        x.scales.shape[-1],
        MATRIX=tile_constants(matrices),
        UP=None if up is None else tile_constants(up),
        ROWS=TILE_ROWS,
        PAIRS=groups.tile_pairs,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        enable_fp_fusion=False,
    )
