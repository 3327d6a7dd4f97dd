"""Turned values and their levels in Triton: `turn.py` and `levels.py`, bit for bit."""

import triton
import triton.language as tl

from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.attention import cache_layout, levels
from coldstream.kernels.attention import turn as definition

BLOCK_VALUES = tl.constexpr(cache_layout.BLOCK_VALUES)
SIGNS = tl.constexpr(definition.SIGNS)
LEVEL_UNIT = tl.constexpr(float(levels.LEVEL_UNIT))
LEVEL_0, LEVEL_1, LEVEL_2, LEVEL_3 = (tl.constexpr(float(level)) for level in levels.LEVELS[:4])
THRESHOLD_1, THRESHOLD_2, THRESHOLD_3 = map(tl.constexpr, levels.THRESHOLDS)
HALF_INFINITY = tl.constexpr(0x7C00)
HALF_NAN = tl.constexpr(0x7E00)


@triton.jit
def turn(x):
    """Of each 32 consecutive values: float32 [N] → [N]."""
    return butterflies(change_signs(x))


@triton.jit
def turn_back(y):
    """What `turn` was given, but for rounding: float32 [N] → [N]."""
    return change_signs(butterflies(y)) * (1 / BLOCK_VALUES)


@triton.jit
def change_signs(x):
    signs = tl.full((x.shape[0],), SIGNS, tl.int32) >> (tl.arange(0, x.shape[0]) % BLOCK_VALUES)
    return tl.where(signs & 1 != 0, -x, x)


@triton.jit
def butterflies(x):
    x = butterfly(x, 1)
    x = butterfly(x, 2)
    x = butterfly(x, 4)
    x = butterfly(x, 8)
    return butterfly(x, 16)


@triton.jit
def butterfly(x, STRIDE: tl.constexpr):
    pairs = tl.reshape(x, (x.shape[0] // (2 * STRIDE), 2, STRIDE))
    a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (x.shape[0],))


@triton.jit
def store_levels(to, blocks, HEAD_DIM: tl.constexpr):
    """Codes of float32 [B, 32], not yet turned, to the address `to`, as many as a head has.

    Returns the bits of the scales, uint16 [B].
    """
    y = tl.reshape(turn(tl.ravel(blocks)), blocks.shape)
    first, second = tl.split(tl.permute(tl.reshape(y, (blocks.shape[0], 2, 16)), (0, 2, 1)))
    mean = tl.div_rn(arithmetic.sum_of_sixteen(tl.fma(second, second, first * first)), BLOCK_VALUES * 1.0)
    bits = tl.div_rn(tl.sqrt_rn(mean), LEVEL_UNIT).to(tl.float16).to(tl.uint16, bitcast=True)
    bits = tl.where((bits & HALF_INFINITY) == HALF_INFINITY, HALF_NAN, bits).to(tl.uint16)
    step = bits.to(tl.float16, bitcast=True).to(tl.float32)[:, None]
    magnitude = tl.abs(y)
    low = (magnitude >= THRESHOLD_1 * step).to(tl.int32) + (magnitude >= THRESHOLD_2 * step).to(tl.int32)
    low += (magnitude >= THRESHOLD_3 * step).to(tl.int32)
    low = tl.where(step > 0, low, 0)
    high = tl.where((step > 0) & (y < 0), 1, 0)
    i = tl.arange(0, 16)
    # Disjoint bits: they add up to the words of the layout.
    low_bits = tl.reshape(low, (blocks.shape[0], 2, 16)) << (i % 8 * 4 + i // 8 * 2)[None, None, :]
    words = tl.reshape(tl.sum(low_bits, axis=2), (blocks.shape[0] * 2,))
    store_words(to, words, HEAD_DIM // 16)
    i = tl.arange(0, BLOCK_VALUES)
    store_words(to + HEAD_DIM // 4, tl.sum(high << (i % 8 * 4 + i // 8)[None, :], axis=1), HEAD_DIM // 32)
    return bits


@triton.jit
def store_words(to, words, COUNT: tl.constexpr):
    """The first COUNT of int32 [N] to the byte address `to`, lowest byte first."""
    word, byte = tl.arange(0, words.shape[0])[:, None], tl.arange(0, 4)[None, :]
    tl.store(to + word * 4 + byte, ((words[:, None] >> (byte * 8)) & 255).to(tl.uint8), mask=word < COUNT)


@triton.jit
def load_levels(rows, i, mask, HEAD_DIM: tl.constexpr):
    """The levels of values i of the rows at addresses `rows`, as float32."""
    block, part, place = i // BLOCK_VALUES, i // 8 % 4, i % 8
    low = tl.load(rows + block * 8 + part // 2 * 4 + place // 2, mask=mask).to(tl.int32)
    high = tl.load(rows + HEAD_DIM // 4 + block * 4 + place // 2, mask=mask).to(tl.int32)
    low = low >> (place % 2 * 4 + part % 2 * 2)
    inner = tl.where(low & 1 != 0, LEVEL_1, LEVEL_0)
    outer = tl.where(low & 1 != 0, LEVEL_3, LEVEL_2)
    level = tl.where(low & 2 != 0, outer, inner)
    return tl.where((high >> (place % 2 * 4 + part)) & 1 != 0, -level, level)
