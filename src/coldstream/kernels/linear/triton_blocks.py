"""The integer part of quantised products for one row of activations, as Triton device functions.

Four codes at a time stay packed in a word and meet four activations in one `dot4`. `p` [N, U] holds the
addresses of U consecutive blocks of N weight rows, as int32 words for the types whose blocks allow it (see
`has_aligned_blocks`) and as uint16 for the others; x [U, 1] the addresses, as int32 words, of the activations
that each block meets, and `sums` [U, 1] those of their int16 sums, as int32 words. Results are int32 [N, U].
"""

import triton
import triton.language as tl

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.triton import dot4
from coldstream.kernels.dequantize.triton_blocks import Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0

WORDS = tl.constexpr(tl.pointer_type(tl.int32))
LOW_NIBBLES = tl.constexpr(0x0F0F0F0F)
LOW_CRUMBS = tl.constexpr(0x03030303)
LOW_BITS = tl.constexpr(0x01010101)
SIX_BITS = tl.constexpr(0x3F3F3F3F)
TOP_TWO_OF_SIX = tl.constexpr(0x30303030)
SPREAD_FOUR_BITS = tl.constexpr(0x00204081)  # times four bits: bit k lands at the bottom of byte k
MINUS_8 = tl.constexpr(0xF8F8F8F8 - 2**32)  # four times in a word
MINUS_16 = tl.constexpr(0xF0F0F0F0 - 2**32)
MINUS_32 = tl.constexpr(0xE0E0E0E0 - 2**32)


def has_aligned_blocks(quant_type: QuantType) -> bool:
    """Whether blocks are read as int32: they lie at multiples of sixteen bytes."""
    return quant_type in (QuantType.Q4_K, QuantType.Q5_K)


@triton.jit
def aligned(p):
    """The int32 words around `p` [N, U], even addresses: [N, U, 1], and whether p is in the middle of one."""
    address = p.to(tl.int64)[:, :, None]
    return (address & -4).to(WORDS), (address & 2) != 0


@triton.jit
def word(words, is_middle, at):
    """The int32 that begins `at` words behind the address that `words` and `is_middle` describe."""
    low = tl.load(words + at)
    high = tl.load(words + at + 1, mask=is_middle, other=0)
    return tl.where(is_middle, ((low >> 16) & 0xFFFF) | (high << 16), low)


@triton.jit
def half_of(bits):
    """The float16 in the low half of an int32, as float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def k_quant_integers(TYPE: tl.constexpr, p, x, sums):
    """Q4_K and Q5_K: Σ scale · code · activation and Σ minimum · activation of each block."""
    QS: tl.constexpr = 4 if TYPE == Q4_K else 12
    # Lane l holds word l of each 32 bytes of codes: low nibbles of sub-block 2u, high ones of 2u + 1.
    lane = tl.arange(0, 8)
    first, second, rest = tl.load(p + 1)[:, :, None], tl.load(p + 2)[:, :, None], tl.load(p + 3)[:, :, None]
    early_scales = first & SIX_BITS
    later_scales = (rest & LOW_NIBBLES) | ((first >> 2) & TOP_TWO_OF_SIX)
    later_mins = ((rest >> 4) & LOW_NIBBLES) | ((second >> 2) & TOP_TWO_OF_SIX)
    blocks = p[:, :, None] + lane[None, None, :]
    if TYPE == Q5_K:
        fifth = tl.load(blocks + 4)
    products = tl.zeros((p.shape[0], p.shape[1], 8), tl.int32)
    for u in tl.static_range(4):
        codes = tl.load(blocks + (QS + 8 * u))
        low, high = codes & LOW_NIBBLES, (codes >> 4) & LOW_NIBBLES
        if TYPE == Q5_K:
            low |= ((fifth >> (2 * u)) & LOW_BITS) << 4
            high |= ((fifth >> (2 * u + 1)) & LOW_BITS) << 4
        x_words = x + (16 * u + lane)[None, :]
        scales = (early_scales if u < 2 else later_scales) >> (16 * (u % 2))
        products += (scales & 255) * dot4(low, tl.load(x_words)[None, :, :], 0)
        products += ((scales >> 8) & 255) * dot4(high, tl.load(x_words + 8)[None, :, :], 0)
    mins = tl.where(lane[None, None, :] < 4, second & SIX_BITS, later_mins) >> (lane % 4 * 8)[None, None, :]
    pair = tl.load(sums + lane[None, :])  # both halves of sub-block l
    offsets = (mins & 255) * ((pair << 16 >> 16) + (pair >> 16))[None, :, :]
    return tl.sum(products, axis=2), tl.sum(offsets, axis=2)


@triton.jit
def q6_k_integers(p, x):
    """Σ scale · (code − 32) · activation of each block."""
    # Lane l holds word l of each 32 bytes; l // 4 says which of two sub-blocks of sixteen it belongs to.
    lane = tl.arange(0, 8)
    shift = (lane // 4 * 8)[None, None, :]
    words, is_middle = aligned(p)
    words += lane[None, None, :]
    products = tl.zeros((p.shape[0], p.shape[1], 8), tl.int32)
    for half in tl.static_range(2):
        crumbs = word(words, is_middle, 32 + 8 * half)
        for v in tl.static_range(2):
            codes = word(words, is_middle, 16 * half + 8 * v)
            low = (codes & LOW_NIBBLES) | (((crumbs >> (2 * v)) & LOW_CRUMBS) << 4)
            high = ((codes >> 4) & LOW_NIBBLES) | (((crumbs >> (2 * v + 4)) & LOW_CRUMBS) << 4)
            low_x = tl.load(x + (32 * half + 8 * v + lane)[None, :])
            high_x = tl.load(x + (32 * half + 8 * v + 16 + lane)[None, :])
            low_scales = tl.load(p + (96 + 4 * half + v)).to(tl.int32)[:, :, None] >> shift
            high_scales = tl.load(p + (98 + 4 * half + v)).to(tl.int32)[:, :, None] >> shift
            low_sums = dot4(low, low_x[None, :, :], dot4(low_x, MINUS_32, 0)[None, :, :])
            high_sums = dot4(high, high_x[None, :, :], dot4(high_x, MINUS_32, 0)[None, :, :])
            products += (low_scales << 24 >> 24) * low_sums + (high_scales << 24 >> 24) * high_sums
    return tl.sum(products, axis=2)


@triton.jit
def small_block_integers(TYPE: tl.constexpr, p, x):
    """Q8_0, Q4_0 and Q5_0: Σ code · activation of each block of 32."""
    words, is_middle = aligned(p + 1)
    if TYPE == Q8_0:
        lane = tl.arange(0, 8)
        codes = word(words + lane[None, None, :], is_middle, 0)
        products = dot4(codes, tl.load(x + lane[None, :])[None, :, :], 0)
    else:
        QS: tl.constexpr = 0 if TYPE == Q4_0 else 1
        OFFSET: tl.constexpr = MINUS_8 if TYPE == Q4_0 else MINUS_16
        lane = tl.arange(0, 4)
        codes = word(words + lane[None, None, :], is_middle, QS)
        low, high = codes & LOW_NIBBLES, (codes >> 4) & LOW_NIBBLES
        if TYPE == Q5_0:
            bits = tl.load(p + 1).to(tl.int32) | (tl.load(p + 2).to(tl.int32) << 16)
            fifth = bits[:, :, None] >> (4 * lane)[None, None, :]
            low |= (((fifth & 15) * SPREAD_FOUR_BITS) & LOW_BITS) << 4
            high |= ((((fifth >> 16) & 15) * SPREAD_FOUR_BITS) & LOW_BITS) << 4
        low_x, high_x = tl.load(x + lane[None, :]), tl.load(x + (lane + 4)[None, :])
        offsets = dot4(low_x, OFFSET, dot4(high_x, OFFSET, 0))
        products = dot4(low, low_x[None, :, :], dot4(high, high_x[None, :, :], offsets[None, :, :]))
    return tl.sum(products, axis=2)


@triton.jit
def fold_blocks(TYPE: tl.constexpr, p, x, sums, scales, lanes):
    """Adds one block to each accumulator: `lanes` [N, U], with the activations' `scales` [U]."""
    scales = scales[None, :]
    if TYPE == Q4_K or TYPE == Q5_K:
        integers, offsets = k_quant_integers(TYPE, p, x, sums)
        factors = tl.load(p)
        lanes = tl.fma(half_of(factors) * scales, integers.to(tl.float32), lanes)
        return tl.fma(half_of(factors >> 16) * scales * -1.0, offsets.to(tl.float32), lanes)
    elif TYPE == Q6_K:
        d = half_of(tl.load(p + 104).to(tl.int32))
        return tl.fma(d * scales, q6_k_integers(p, x).to(tl.float32), lanes)
    else:
        d = half_of(tl.load(p).to(tl.int32))
        return tl.fma(d * scales, small_block_integers(TYPE, p, x).to(tl.float32), lanes)
