"""What the bytes of every quantised block mean, as Triton device functions.

The functions take `TYPE`, the number of a `QuantType`, at compile time. `p` is a tile of addresses of blocks,
`i` one of element numbers within a block and `j` one of sub-block numbers, of shapes that broadcast with it.
Value i, in sub-block j, is (d · scale(j)) · code(i) − dmin · min(j), as in `integer_blocks.py`. `table` holds
the int8 values that a type's codes go through (see `code_table`), or is None.
"""

from collections.abc import Callable, Mapping
from functools import cache

import torch
import triton
import triton.language as tl

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize import grids, unpack_linear

Q4_0, Q4_1 = tl.constexpr(int(QuantType.Q4_0)), tl.constexpr(int(QuantType.Q4_1))
Q5_0, Q5_1 = tl.constexpr(int(QuantType.Q5_0)), tl.constexpr(int(QuantType.Q5_1))
Q8_0, Q2_K = tl.constexpr(int(QuantType.Q8_0)), tl.constexpr(int(QuantType.Q2_K))
Q3_K, Q4_K = tl.constexpr(int(QuantType.Q3_K)), tl.constexpr(int(QuantType.Q4_K))
Q5_K, Q6_K = tl.constexpr(int(QuantType.Q5_K)), tl.constexpr(int(QuantType.Q6_K))
IQ2_XXS, IQ2_XS = tl.constexpr(int(QuantType.IQ2_XXS)), tl.constexpr(int(QuantType.IQ2_XS))
IQ3_XXS, IQ1_S = tl.constexpr(int(QuantType.IQ3_XXS)), tl.constexpr(int(QuantType.IQ1_S))
IQ4_NL, IQ3_S = tl.constexpr(int(QuantType.IQ4_NL)), tl.constexpr(int(QuantType.IQ3_S))
IQ2_S, IQ4_XS = tl.constexpr(int(QuantType.IQ2_S)), tl.constexpr(int(QuantType.IQ4_XS))
IQ1_M, MXFP4 = tl.constexpr(int(QuantType.IQ1_M)), tl.constexpr(int(QuantType.MXFP4))

SUB_BLOCKS: Mapping[QuantType, int] = {
    **dict.fromkeys((QuantType.Q4_K, QuantType.Q5_K, QuantType.IQ2_XXS, QuantType.IQ3_XXS), 8),
    **dict.fromkeys((QuantType.IQ3_S, QuantType.IQ1_S, QuantType.IQ4_XS), 8),
    **dict.fromkeys((QuantType.Q2_K, QuantType.Q3_K, QuantType.Q6_K, QuantType.IQ2_XS), 16),
    **dict.fromkeys((QuantType.IQ2_S, QuantType.IQ1_M), 16),
}
TABLES: Mapping[QuantType, Callable[[], torch.Tensor]] = {
    QuantType.IQ1_S: grids.iq1_grid,
    QuantType.IQ1_M: grids.iq1_grid,
    QuantType.IQ2_XXS: grids.iq2_xxs_grid,
    QuantType.IQ2_XS: grids.iq2_xs_grid,
    QuantType.IQ2_S: grids.iq2_s_grid,
    QuantType.IQ3_XXS: grids.iq3_xxs_grid,
    QuantType.IQ3_S: grids.iq3_s_grid,
    QuantType.IQ4_NL: lambda: torch.tensor(unpack_linear.IQ4_VALUES),
    QuantType.IQ4_XS: lambda: torch.tensor(unpack_linear.IQ4_VALUES),
    QuantType.MXFP4: lambda: torch.tensor(unpack_linear.E2M1_DOUBLED),
}


def num_sub_blocks(quant_type: QuantType) -> int:
    """How many scales a block has; 1 where the block itself is the sub-block."""
    return SUB_BLOCKS.get(quant_type, 1)


@cache
def code_table(quant_type: QuantType, device: torch.device) -> torch.Tensor | None:
    """The int8 table of a type on `device`, made once; None for types without one."""
    table = TABLES.get(quant_type)
    return None if table is None else table().flatten().to(torch.int8).to(device)


@triton.jit
def byte(p, at):
    return tl.load(p + at).to(tl.int32)


@triton.jit
def signed_byte(p, at):
    return tl.load((p + at).to(tl.pointer_type(tl.int8))).to(tl.int32)


@triton.jit
def word16(p, at):
    return tl.load((p + at).to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def half(p, at):
    return tl.load((p + at).to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def nibble(p, at, high):
    """The low nibble of a byte, or the high one where `high` is 1."""
    return (byte(p, at) >> (4 * high)) & 15


@triton.jit
def is_negative(bits, k):
    """Bit k of the signs of eight values, of which seven bits are given: an even number is negative."""
    parity = bits ^ (bits >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return ((bits | (parity << 7)) >> k) & 1


@triton.jit
def small_block_code(TYPE: tl.constexpr, p, i, table):
    """Codes of the types with blocks of 32."""
    if TYPE == Q8_0:
        return signed_byte(p, 2 + i)
    elif TYPE == Q4_0:
        return nibble(p, 2 + i % 16, i // 16) - 8
    elif TYPE == Q4_1:
        return nibble(p, 4 + i % 16, i // 16)
    elif TYPE == Q5_0:
        return nibble(p, 6 + i % 16, i // 16) + 16 * ((byte(p, 2 + i // 8) >> (i % 8)) & 1) - 16
    elif TYPE == Q5_1:
        return nibble(p, 8 + i % 16, i // 16) + 16 * ((byte(p, 4 + i // 8) >> (i % 8)) & 1)
    elif TYPE == IQ4_NL:
        return tl.load(table + nibble(p, 2 + i % 16, i // 16)).to(tl.int32)
    else:
        tl.static_assert(TYPE == MXFP4)
        return tl.load(table + nibble(p, 1 + i % 16, i // 16)).to(tl.int32)


@triton.jit
def linear_code(TYPE: tl.constexpr, p, i, table):
    """Codes of the types with blocks of 256 that have no grid."""
    if TYPE == Q4_K:
        return nibble(p, 16 + i // 64 * 32 + i % 32, i // 32 % 2)
    elif TYPE == Q5_K:
        low = nibble(p, 48 + i // 64 * 32 + i % 32, i // 32 % 2)
        return low + 16 * ((byte(p, 16 + i % 32) >> (i // 32)) & 1)
    elif TYPE == Q6_K:
        low = nibble(p, i // 128 * 64 + i % 64, i // 64 % 2)
        high = (byte(p, 128 + i // 128 * 32 + i % 32) >> (i // 32 % 4 * 2)) & 3
        return low + 16 * high - 32
    elif TYPE == Q2_K:
        return (byte(p, 16 + i // 128 * 32 + i % 32) >> (i // 32 % 4 * 2)) & 3
    elif TYPE == Q3_K:
        low = (byte(p, 32 + i // 128 * 32 + i % 32) >> (i // 32 % 4 * 2)) & 3
        return low + 4 * ((byte(p, i % 32) >> (i // 32)) & 1) - 4
    else:
        tl.static_assert(TYPE == IQ4_XS)
        return tl.load(table + nibble(p, 8 + i // 32 * 16 + i % 16, i // 16 % 2)).to(tl.int32)


@triton.jit
def grid_code(TYPE: tl.constexpr, p, i, table):
    """Codes of the types with a grid: an entry of eight or four values, with a sign each or moved by 1/8."""
    eighth, quarter, word = i // 8, i // 4, i // 32
    if TYPE == IQ2_XXS:
        entry = byte(p, 2 + word * 8 + eighth % 4) * 8 + i % 8
        signs = (word16(p, 6 + word * 8) | (word16(p, 8 + word * 8) << 16)) >> (eighth % 4 * 7)
        negative = is_negative(signs & 127, i % 8)
    elif TYPE == IQ2_XS:
        entry = (word16(p, 2 + eighth * 2) & 511) * 8 + i % 8
        negative = is_negative(word16(p, 2 + eighth * 2) >> 9, i % 8)
    elif TYPE == IQ2_S:
        high = (byte(p, 66 + word) >> (eighth % 4 * 2)) & 3
        entry = (byte(p, 2 + eighth) + 256 * high) * 8 + i % 8
        negative = (byte(p, 34 + eighth) >> (i % 8)) & 1
    elif TYPE == IQ3_XXS:
        entry = byte(p, 2 + quarter) * 4 + i % 4
        signs = (word16(p, 66 + word * 4) | (word16(p, 68 + word * 4) << 16)) >> (eighth % 4 * 7)
        negative = is_negative(signs & 127, i % 8)
    elif TYPE == IQ3_S:
        high = (byte(p, 66 + word) >> (quarter % 8)) & 1
        entry = (byte(p, 2 + quarter) + 256 * high) * 4 + i % 4
        negative = (byte(p, 74 + eighth) >> (i % 8)) & 1
    elif TYPE == IQ1_S:
        high = word16(p, 34 + word * 2)
        entry = (byte(p, 2 + eighth) + 256 * ((high >> (eighth % 4 * 3)) & 7)) * 8 + i % 8
        negative = high >> 15
    else:
        tl.static_assert(TYPE == IQ1_M)
        high = nibble(p, 32 + eighth // 2, eighth % 2)
        entry = (byte(p, eighth) + 256 * (high & 7)) * 8 + i % 8
        negative = high >> 3
    value = tl.load(table + entry).to(tl.int32)
    if TYPE == IQ1_S or TYPE == IQ1_M:
        return 8 * value + (1 - 2 * negative)
    else:
        return value * (1 - 2 * negative)


@triton.jit
def code(TYPE: tl.constexpr, p, i, table):
    """int32 code of element i."""
    if TYPE < Q2_K or TYPE == IQ4_NL or TYPE == MXFP4:
        return small_block_code(TYPE, p, i, table)
    elif TYPE <= Q6_K or TYPE == IQ4_XS:
        return linear_code(TYPE, p, i, table)
    else:
        return grid_code(TYPE, p, i, table)


@triton.jit
def scale(TYPE: tl.constexpr, p, j):
    """int32 scale of sub-block j, of a type whose blocks have several."""
    if TYPE == Q4_K or TYPE == Q5_K:
        high_bits = (byte(p, 4 + j % 4) >> 6) << 4
        return tl.where(j < 4, byte(p, 4 + j % 4) & 63, nibble(p, 12 + j % 4, 0) | high_bits)
    elif TYPE == Q6_K:
        return signed_byte(p, 192 + j)
    elif TYPE == Q2_K:
        return byte(p, j) & 15
    elif TYPE == Q3_K:
        return nibble(p, 96 + j % 8, j // 8) + 16 * ((byte(p, 104 + j % 4) >> (j // 4 * 2)) & 3) - 32
    elif TYPE == IQ4_XS:
        return nibble(p, 4 + j // 2, j % 2) + 16 * ((byte(p, 2 + j // 4) >> (j % 4 * 2)) & 3) - 32
    elif TYPE == IQ2_XXS:
        return 1 + 2 * (word16(p, 8 + j * 8) >> 12)
    elif TYPE == IQ3_XXS:
        return 1 + 2 * (word16(p, 68 + j * 4) >> 12)
    elif TYPE == IQ2_XS:
        return 1 + 2 * nibble(p, 66 + j // 2, j % 2)
    elif TYPE == IQ2_S:
        return 1 + 2 * nibble(p, 74 + j // 2, j % 2)
    elif TYPE == IQ3_S:
        return 1 + 2 * nibble(p, 106 + j // 2, j % 2)
    elif TYPE == IQ1_S:
        return 1 + 2 * ((word16(p, 34 + j * 2) >> 12) & 7)
    else:
        tl.static_assert(TYPE == IQ1_M)
        return 1 + 2 * ((word16(p, 48 + j // 4 * 2) >> (j % 4 * 3)) & 7)


@triton.jit
def minimum(TYPE: tl.constexpr, p, j):
    """int32 minimum of sub-block j, of a type that has them."""
    if TYPE == Q2_K:
        return byte(p, j) >> 4
    else:
        tl.static_assert(TYPE == Q4_K or TYPE == Q5_K)
        high_bits = (byte(p, 8 + j % 4) >> 6) << 4
        return tl.where(j < 4, byte(p, 8 + j % 4) & 63, nibble(p, 12 + j % 4, 1) | high_bits)


@triton.jit
def factor(TYPE: tl.constexpr, p):
    """float32 d of a block."""
    if TYPE == Q2_K:
        return half(p, 80)
    elif TYPE == Q3_K:
        return half(p, 108)
    elif TYPE == Q6_K:
        return half(p, 208)
    elif TYPE == IQ3_XXS:
        return half(p, 0) * 0.25
    elif TYPE == IQ2_XXS or TYPE == IQ2_XS or TYPE == IQ2_S or TYPE == IQ1_S:
        return half(p, 0) * 0.125
    elif TYPE == IQ1_M:
        low = (word16(p, 48) >> 12) | (word16(p, 50) >> 12 << 4)
        bits = low | (word16(p, 52) >> 12 << 8) | (word16(p, 54) >> 12 << 12)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 0.125
    elif TYPE == MXFP4:
        exponent = byte(p, 0)
        # The float32 exponent field is e − 1; the two smallest powers are denormal.
        bits = tl.where(exponent < 2, 1 << (21 + tl.minimum(exponent, 1)), (exponent - 1) << 23)
        return bits.to(tl.float32, bitcast=True)
    else:
        return half(p, 0)


@triton.jit
def minimum_factor(TYPE: tl.constexpr, p):
    """float32 dmin of a block, of a type that has minima."""
    if TYPE == Q2_K:
        return half(p, 82)
    elif TYPE == Q4_1 or TYPE == Q5_1:
        return half(p, 2) * -1.0
    else:
        tl.static_assert(TYPE == Q4_K or TYPE == Q5_K)
        return half(p, 2)


@triton.jit
def value(TYPE: tl.constexpr, p, i, SUB_BLOCK_SIZE: tl.constexpr, table):
    """float32 value of element i."""
    j = i // SUB_BLOCK_SIZE
    d = factor(TYPE, p)
    if TYPE >= Q2_K and TYPE != IQ4_NL and TYPE != MXFP4:
        d = d * scale(TYPE, p, j).to(tl.float32)
    result = d * code(TYPE, p, i, table).to(tl.float32)
    if TYPE == Q4_K or TYPE == Q5_K or TYPE == Q2_K:
        result = result - minimum_factor(TYPE, p) * minimum(TYPE, p, j).to(tl.float32)
    elif TYPE == Q4_1 or TYPE == Q5_1:
        result = result - minimum_factor(TYPE, p)
    return result
