"""Tiles of a matrix product as Triton device functions, for dense matrices and for experts alike.

A caller passes the address of a matrix, not its place: nothing here knows who owns the weights. `GEOMETRY`
arguments are those of `RowGeometry.constants`.
"""

import triton
import triton.language as tl

from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.triton import GROUP_SIZE, SUMS_PER_GROUP
from coldstream.kernels.dequantize import triton_blocks as blocks
from coldstream.kernels.dequantize.triton import float_value
from coldstream.kernels.dequantize.triton_blocks import Q4_K, Q5_K
from coldstream.kernels.linear.triton_blocks import WORDS, fold_blocks

NUM_LANES = tl.constexpr(8)  # accumulators of an integer product
SUB_BLOCK_32 = tl.constexpr(32)


@triton.jit
def sum_of_first(lanes):
    """The sum of eight accumulators of which only the first 1, 2, 4 or 8 were used: [N, U] → [N]."""
    if lanes.shape[1] < NUM_LANES:
        lanes += 0.0  # what the unused ones add; it turns −0 into 0
    if lanes.shape[1] == 8:
        lanes = arithmetic.add_halves(lanes)
    if lanes.shape[1] == 4:
        lanes = arithmetic.add_halves(lanes)
    if lanes.shape[1] == 2:
        even, odd = tl.split(lanes)
        return even + odd
    else:
        return tl.reshape(lanes, (lanes.shape[0],))


@triton.jit
def row_products(
    weight,
    n,
    row_bytes,
    q,
    scales,
    sums,
    num_cols,
    TYPE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Rows n [N] of an integer-type matrix times one row of activations: float32 [N].

    weight, q and sums are addresses of int32 (weight: uint16 where blocks are not aligned), scales one of
    float32. UNITS blocks, 1, 2, 4 or 8 and all where the row has fewer than 8, are taken at once.
    """
    UNIT_BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    num_blocks = num_cols // BLOCK_ELEMENTS
    rows = weight + (n.to(tl.int64) * (row_bytes // UNIT_BYTES))[:, None]
    lanes = tl.zeros((n.shape[0], UNITS), tl.float32)
    UNROLL: tl.constexpr = 4 if BLOCK_ELEMENTS == SUB_BLOCK_32 else 1
    for first in tl.range(0, num_blocks, UNITS, loop_unroll_factor=UNROLL):
        unit = first + tl.arange(0, UNITS)
        block = tl.minimum(unit, num_blocks - 1)
        p = rows + block[None, :] * (BLOCK_BYTES // UNIT_BYTES)
        x = q + (block * (BLOCK_ELEMENTS // 4))[:, None]
        group = block * BLOCK_ELEMENTS // GROUP_SIZE
        group_sums = sums + (group * (SUMS_PER_GROUP // 2))[:, None]
        folded = fold_blocks(TYPE, p, x, group_sums, tl.load(scales + group), lanes)
        lanes = tl.where((unit < num_blocks)[None, :], folded, lanes)
    return sum_of_first(lanes)


@triton.jit
def k_quant_scale(first, rest, S: tl.constexpr):
    """The scale of sub-block S of Q4_K and Q5_K blocks, from their second and fourth words."""
    if S < 4:
        return (first >> (8 * S)) & 63
    else:
        return ((rest >> (8 * S - 32)) & 15) | (((first >> (8 * S - 26)) & 3) << 4)


@triton.jit
def block_integers(
    TYPE: tl.constexpr,
    p,
    q,
    BLOCK_ELEMENTS: tl.constexpr,
    SUB_BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Σ scale · code · activation of one block of each weight row against each token: int32 [ROWS, TOKENS].

    p [ROWS] holds the blocks' addresses, q [TOKENS] those of the first code that the block meets.
    """
    # Everything is read before the first product, so that the block costs one latency and not one per step.
    codes = ()
    x = ()
    for s in tl.static_range(BLOCK_ELEMENTS // SUB_BLOCK_32):
        i = s * SUB_BLOCK_32 + tl.arange(0, SUB_BLOCK_32)
        codes += (blocks.code(TYPE, p[:, None], i[None, :], None).to(tl.int8),)
        x += (tl.load(q[None, :] + i[:, None]),)
    products = tl.zeros((ROWS, TOKENS), tl.int32)
    if SUB_BLOCK_SIZE == 16:
        # The tensor core takes no fewer than 32 codes: each half meets zeros in place of the other.
        is_first = (tl.arange(0, SUB_BLOCK_32) < 16)[None, :]
        for s in tl.static_range(BLOCK_ELEMENTS // SUB_BLOCK_32):
            first = tl.dot(tl.where(is_first, codes[s], 0), x[s])
            second = tl.dot(tl.where(is_first, 0, codes[s]), x[s])
            products += blocks.scale(TYPE, p, 2 * s)[:, None] * first
            products += blocks.scale(TYPE, p, 2 * s + 1)[:, None] * second
    elif BLOCK_ELEMENTS == SUB_BLOCK_32:
        products = tl.dot(codes[0], x[0])
    else:
        header = p.to(WORDS)
        first, rest = tl.load(header + 1), tl.load(header + 3)
        for s in tl.static_range(BLOCK_ELEMENTS // SUB_BLOCK_32):
            products += k_quant_scale(first, rest, s)[:, None] * tl.dot(codes[s], x[s])
    return products


@triton.jit
def block_offsets(TYPE: tl.constexpr, p, sums):
    """Σ minimum · activation of one block of each weight row against each token: int32 [N, T].

    Sums of 32 codes go through tensor cores in two parts, 64 · high + low.
    """
    k = tl.arange(0, SUB_BLOCK_32)
    at, is_used = k % 8, (k < 8)[:, None]
    pairs = sums.to(WORDS)[None, :] + at[:, None]
    pair = tl.load(pairs, mask=is_used, other=0)
    sum32 = (pair << 16 >> 16) + (pair >> 16)
    mins = blocks.minimum(TYPE, p[:, None], at[None, :]).to(tl.int8)
    high = tl.dot(mins, (sum32 >> 6).to(tl.int8))
    return 64 * high + tl.dot(mins, (sum32 & 63).to(tl.int8))


@triton.jit
def fold_tile(
    p,
    weight,
    q,
    scales,
    sums,
    block,
    TYPE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SUB_BLOCK_SIZE: tl.constexpr,
):
    """Adds one block of each weight row to the accumulators p [N, T].

    weight [N] and q, scales and sums [T] are the addresses of whole rows.
    """
    at = weight + block * BLOCK_BYTES
    group = block * BLOCK_ELEMENTS // GROUP_SIZE
    x = q + block * BLOCK_ELEMENTS
    products = block_integers(TYPE, at, x, BLOCK_ELEMENTS, SUB_BLOCK_SIZE, p.shape[0], p.shape[1])
    a = tl.load(scales + group)[None, :]
    p = tl.fma(blocks.factor(TYPE, at)[:, None] * a, products.to(tl.float32), p)
    if TYPE == Q4_K or TYPE == Q5_K:
        offsets = block_offsets(TYPE, at, sums + group * SUMS_PER_GROUP)
        p = tl.fma(blocks.minimum_factor(TYPE, at)[:, None] * a * -1.0, offsets.to(tl.float32), p)
    return p


@triton.jit
def tile_products(
    weight,
    n,
    row_bytes,
    q,
    scales,
    sums,
    num_cols,
    TYPE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SUB_BLOCK_SIZE: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Rows n [N] of an integer-type matrix times rows of activations: float32 [N, T].

    weight is the address of the matrix (uint8); q, scales and sums [T] those of the rows of activations. Of
    the eight accumulators the first UNITS (1, 2, 4 or 8) may be used. They are independent of each other, so
    they are made one after the other, in the order in which the final tree joins them: that keeps four tiles
    alive instead of eight.
    """
    rows = weight + n.to(tl.int64) * row_bytes
    num_blocks = num_cols // BLOCK_ELEMENTS
    turns = (num_blocks + NUM_LANES - 1) // NUM_LANES
    p = tl.zeros((n.shape[0], q.shape[0]), tl.float32)
    pair = p
    four = p
    even = p
    total = p
    for i in range(UNITS * turns):
        step = i // turns
        # The bits of the accumulator's number come in reverse: 0 4 2 6 1 5 3 7.
        lane = (step % 2) * (UNITS // 2) + (step // 2 % 2) * (UNITS // 4) + step // 4
        block = lane + i % turns * NUM_LANES
        existing = tl.minimum(block, num_blocks - 1)
        folded = fold_tile(
            p, rows, q, scales, sums, existing, TYPE, BLOCK_ELEMENTS, BLOCK_BYTES, SUB_BLOCK_SIZE
        )
        p = tl.where(block < num_blocks, folded, p)
        if i % turns == turns - 1:
            total = p
            if UNITS < NUM_LANES:
                total += 0.0  # what the accumulators that no block uses add; it turns −0 into 0
            if step % 2 == 0:
                pair = total
            else:
                total = pair + total
                if step % 4 == 1:
                    four = total
                else:
                    total = four + total
                    if step == 3:
                        even = total
                    else:
                        total = even + total
            p = tl.zeros((n.shape[0], q.shape[0]), tl.float32)
    return total


@triton.jit
def float_products(
    weight, n, row_bytes, x, num_cols, TYPE: tl.constexpr, UNROLL: tl.constexpr, TOKENS: tl.constexpr
):
    """Rows n [N] of a matrix of floats times rows of floats, by sixteen accumulators: float32 [TOKENS · N].

    weight is the address of the matrix (uint8), x [TOKENS] those of the rows of activations (float32).
    """
    LANES: tl.constexpr = arithmetic.NUM_LANES
    ROWS: tl.constexpr = n.shape[0]
    rows = (weight + n.to(tl.int64) * row_bytes)[:, None]
    lane = tl.arange(0, LANES)
    p = tl.zeros((TOKENS, ROWS, LANES), tl.float32)
    for first in range(0, num_cols, LANES * UNROLL):
        for step in tl.static_range(UNROLL):
            k = first + step * LANES + lane
            is_valid = k < num_cols
            w = float_value(TYPE, rows, k[None, :], is_valid[None, :])
            values = tl.load(x[:, None] + k[None, :], mask=is_valid[None, :], other=0.0)
            folded = tl.fma(values[:, None, :], w[None, :, :], p)
            p = tl.where(is_valid[None, None, :], folded, p)
    return arithmetic.sum_of_sixteen(tl.reshape(p, (TOKENS * ROWS, LANES)))
