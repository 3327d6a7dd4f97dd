"""The pieces of the Triton attention kernels: rows of a cache, heads made ready, one chunk of positions."""

import triton
import triton.language as tl

from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.triton import INFINITY_BITS, MAGNITUDE_BITS, SMALLEST_MAXIMUM
from coldstream.kernels.attention import cache_layout, exact, triton_turned

BLOCK = tl.constexpr(exact.BLOCK_SIZE)
CHUNK = tl.constexpr(exact.CHUNK_SIZE)
SCALE_VALUES = tl.constexpr(cache_layout.BLOCK_VALUES)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def scales_begin(HEAD_DIM: tl.constexpr, TYPE: tl.constexpr):
    """Bytes of a row's codes."""
    return HEAD_DIM * (8 if TYPE == "q8_0" else 4 if TYPE == "q4_0" else 3) // 8


@triton.jit
def store_scales(to, bits, HEAD_DIM: tl.constexpr):
    """Float16 bits uint16 [B] to the address `to`, as many as a head has."""
    block = tl.arange(0, bits.shape[0])
    tl.store(to + block * 2, (bits & 255).to(tl.uint8), mask=block < HEAD_DIM // SCALE_VALUES)
    tl.store(to + block * 2 + 1, (bits >> 8).to(tl.uint8), mask=block < HEAD_DIM // SCALE_VALUES)


@triton.jit
def load_values(cache, row, i, mask, HEAD_DIM: tl.constexpr, TYPE: tl.constexpr):
    """Value i of the head rows at element offsets `row`, as float32."""
    if TYPE == "f16" or TYPE == "f32":
        return tl.load(cache + row + i, mask=mask).to(tl.float32)
    scale_at = cache + row + scales_begin(HEAD_DIM, TYPE) + i // SCALE_VALUES * 2
    low = tl.load(scale_at, mask=mask).to(tl.uint16)
    high = tl.load(scale_at + 1, mask=mask).to(tl.uint16)
    scale = (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)
    if TYPE == "q8_0":
        code = tl.load(cache + row + i, mask=mask).to(tl.int8, bitcast=True).to(tl.float32)
    elif TYPE == "tq3_0":
        code = triton_turned.load_levels(cache + row, i, mask, HEAD_DIM)
    else:
        byte = tl.load(cache + row + i // 2, mask=mask).to(tl.int32)
        code = ((byte >> (i % 2 * 4)) & 15).to(tl.float32) - 8.0
    return code * scale


@triton.jit
def store_values(cache, row, values, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """Head row at element offset `row` from float32 values [WIDTH], of which HEAD_DIM count."""
    i = tl.arange(0, WIDTH)
    if TYPE == "f16" or TYPE == "f32":
        tl.store(cache + row + i, values.to(cache.dtype.element_ty), mask=i < HEAD_DIM)
        return
    blocks = tl.reshape(values, (WIDTH // SCALE_VALUES, SCALE_VALUES))
    if TYPE == "tq3_0":
        bits = triton_turned.store_levels(cache + row, blocks, HEAD_DIM)
        store_scales(cache + row + scales_begin(HEAD_DIM, TYPE), bits, HEAD_DIM)
        return
    max_bits = tl.max(blocks.to(tl.int32, bitcast=True) & MAGNITUDE_BITS, axis=1)
    is_zero = max_bits.to(tl.float32, bitcast=True) < SMALLEST_MAXIMUM
    is_finite = max_bits < INFINITY_BITS
    if TYPE == "q8_0":
        extreme, largest = max_bits.to(tl.float32, bitcast=True), 127.0
    else:
        greatest, least = tl.max(blocks, axis=1), tl.min(blocks, axis=1)
        extreme, largest = tl.where(greatest >= -least, greatest, least), -8.0
    scale = tl.where(is_zero, 0.0, tl.div_rn(extreme, largest))
    bits = tl.where(is_finite, scale, float("nan")).to(tl.float16).to(tl.uint16, bitcast=True)
    store_scales(cache + row + scales_begin(HEAD_DIM, TYPE), bits, HEAD_DIM)
    rounded = arithmetic.round_to_integer(blocks * tl.div_rn(largest, extreme)[:, None])
    codes = tl.where((is_finite & (is_zero == 0))[:, None], rounded, 0.0).to(tl.int32)
    if TYPE == "q8_0":
        tl.store(cache + row + i, tl.reshape(codes & 255, (WIDTH,)).to(tl.uint8), mask=i < HEAD_DIM)
    else:
        even, odd = tl.split(tl.reshape(tl.minimum(codes, 7) + 8, (WIDTH // 2, 2)))
        pair = tl.arange(0, WIDTH // 2)
        tl.store(cache + row + pair, (even | (odd << 4)).to(tl.uint8), mask=pair < HEAD_DIM // 2)


@triton.jit
def norm_and_rotate(
    x, weight, eps, angles, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROPE_HALF: tl.constexpr
):
    """The head at x, RMS-normed and rotated by angles [ROPE_HALF, 2]: [WIDTH]."""
    lane = tl.arange(0, 16)
    squares = tl.zeros((1, 16), tl.float32)
    for step in range(0, HEAD_DIM, 16):
        part = tl.load(x + step + lane, mask=step + lane < HEAD_DIM, other=0.0)[None, :]
        squares = tl.fma(part, part, squares)
    mean = tl.div_rn(arithmetic.sum_of_sixteen(squares), HEAD_DIM * 1.0)
    scale = arithmetic.inverse_sqrt(mean + eps)
    i = tl.arange(0, WIDTH)
    is_first, is_rotated = i < ROPE_HALF, i < 2 * ROPE_HALF
    partner = tl.where(is_first, i + ROPE_HALF, i - ROPE_HALF)
    own = tl.load(x + i, mask=i < HEAD_DIM, other=0.0) * scale
    own = own * tl.load(weight + i, mask=i < HEAD_DIM, other=0.0)
    other = tl.load(x + partner, mask=is_rotated, other=0.0) * scale
    other = other * tl.load(weight + partner, mask=is_rotated, other=0.0)
    pair = tl.where(is_first, i, i - ROPE_HALF)
    cos = tl.load(angles + 2 * pair, mask=is_rotated, other=0.0)
    crossed = other * tl.load(angles + 2 * pair + 1, mask=is_rotated, other=0.0)
    return tl.where(is_rotated, tl.fma(own, cos, tl.where(is_first, -crossed, crossed)), own)


@triton.jit
def sum_of_block(weights):
    """Sums over rows of 64 places by sixteen accumulators: float32 [M, 64] → [M]."""
    parts = tl.permute(tl.reshape(weights, (weights.shape[0], 2, 2, 16)), (0, 3, 1, 2))
    even, odd = tl.split(parts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return arithmetic.sum_of_sixteen(((first + second) + third) + fourth)


@triton.jit
def attend_chunk(
    query,
    query_rows,
    first,
    last,
    k_cache,
    v_cache,
    base,
    position_stride,
    chunk,
    lowest,
    highest,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Rows of queries over those of their positions first … last (int32 [ROWS]) that lie in one chunk.

    query_rows: element offsets [ROWS]; base: that of the slot's and head's position 0; lowest … highest: the
    positions that any row sees. Returns maxima and denominators [ROWS] and numerators [ROWS, WIDTH]; those of
    rows that see nothing of the chunk mean nothing.
    """
    i = tl.arange(0, WIDTH)
    places = tl.arange(0, BLOCK)
    maxima = tl.full((ROWS,), NEGATIVE_INFINITY, tl.float32)
    denominators = tl.zeros((ROWS,), tl.float32)
    numerators = tl.zeros((ROWS, WIDTH), tl.float32)
    position_stride = position_stride.to(tl.int64)
    end = tl.minimum(chunk + CHUNK, highest + 1)
    for begin in range(tl.maximum(chunk, lowest // BLOCK * BLOCK), end, BLOCK):
        positions = begin + places
        seen = (positions[None, :] >= first[:, None]) & (positions[None, :] <= last[:, None])
        rows = base + tl.minimum(positions, highest) * position_stride
        scores = tl.zeros((ROWS, BLOCK), tl.float32)
        for d in range(HEAD_DIM):
            q = tl.load(query + query_rows + d)
            k = load_values(k_cache, rows, d, None, HEAD_DIM, TYPE)
            scores = tl.fma(q[:, None], k[None, :], scores)
        greatest = tl.max(tl.where(seen, scores, NEGATIVE_INFINITY), axis=1)
        started = tl.maximum(first, chunk) < begin
        used = (begin <= last) & (begin + BLOCK > first)
        after = tl.where(started, tl.maximum(maxima, greatest), greatest)
        correction = tl.where(started & used, arithmetic.exp(maxima - after), 1.0)
        weights = tl.where(seen, arithmetic.exp(scores - after[:, None]), 0.0)
        total = sum_of_block(weights)
        joined = tl.where(started, tl.fma(denominators, correction, total), total)
        denominators = tl.where(used, joined, denominators)
        maxima = tl.where(used, after, maxima)
        numerators = numerators * correction[:, None]
        for place in range(tl.minimum(BLOCK, end - begin)):
            # Zeros and one weight: their sum is that weight in any order.
            weight = tl.sum(tl.where(places[None, :] == place, weights, 0.0), axis=1)
            row = base + (begin + place) * position_stride
            v = load_values(v_cache, row, i, i < HEAD_DIM, HEAD_DIM, TYPE)
            sees = (begin + place >= first) & (begin + place <= last)
            numerators = tl.where(sees[:, None], tl.fma(weight[:, None], v[None, :], numerators), numerators)
    return maxima, denominators, numerators
