"""docs/arithmetic.md as Triton device functions, bit for bit: the pieces that every Triton kernel shares.

Kernels that use them are launched with `enable_fp_fusion=False`, so that a product and a sum round once
only where `tl.fma` says so. `/`, `tl.sqrt`, `tl.exp` and `tl.sum` of floats are not part of the arithmetic:
they are approximate, or sum in an order of their own.
"""

import triton
import triton.language as tl

from coldstream.kernels.arithmetic import reference

GROUP_SIZE = tl.constexpr(reference.GROUP_SIZE)
SUM_SIZE = tl.constexpr(reference.SUM_SIZE)
SUMS_PER_GROUP = tl.constexpr(reference.GROUP_SIZE // reference.SUM_SIZE)
NUM_LANES = tl.constexpr(reference.NUM_LANES)
LARGEST_CODE = tl.constexpr(float(reference.LARGEST_CODE))
SMALLEST_MAXIMUM = tl.constexpr(reference.SMALLEST_MAXIMUM)
EXPONENT_BIAS = tl.constexpr(reference.EXPONENT_BIAS)
EXP_MIN, EXP_MAX = tl.constexpr(reference.EXP_MIN), tl.constexpr(reference.EXP_MAX)
LOG2_E = tl.constexpr(reference.LOG2_E)
MINUS_LN2_HIGH, MINUS_LN2_LOW = tl.constexpr(-reference.LN2_HIGH), tl.constexpr(-reference.LN2_LOW)
C7, C6, C5, C4, C3, C2, C1, C0 = map(tl.constexpr, reference.EXP_COEFFICIENTS)
ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)  # adding it leaves no fraction bits, ties to even
ROUND_TO_INTEGER_BITS = tl.constexpr(0x4B400000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def dot4(a, b, c):
    """The four products of the int8 in words a and b, added to c: int32 tiles of shapes that broadcast."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def round_to_integer(x):
    """The nearest integer, ties to even, of float32 |x| < 2^22."""
    return (x + ROUND_TO_INTEGER) - ROUND_TO_INTEGER


@triton.jit
def exp(x):
    """e^x by one polynomial, float32; NaN stays NaN."""
    x = tl.where(x < EXP_MIN, EXP_MIN, x)
    x = tl.where(x > EXP_MAX, EXP_MAX, x)
    shifted = x * LOG2_E + ROUND_TO_INTEGER
    n = shifted - ROUND_TO_INTEGER
    t = tl.fma(n, MINUS_LN2_LOW, tl.fma(n, MINUS_LN2_HIGH, x))
    result = tl.fma(t, C7, C6)
    result = tl.fma(result, t, C5)
    result = tl.fma(result, t, C4)
    result = tl.fma(result, t, C3)
    result = tl.fma(result, t, C2)
    result = tl.fma(result, t, C1)
    result = tl.fma(result, t, C0)
    exponent = shifted.to(tl.int32, bitcast=True) - ROUND_TO_INTEGER_BITS + EXPONENT_BIAS
    return result * (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)), float32."""
    return tl.div_rn(1.0, exp(-x) + 1.0)


@triton.jit
def silu(x):
    """x · sigmoid(x), float32."""
    return x * sigmoid(x)


@triton.jit
def swiglu(gate, up):
    """silu(gate) · up, float32."""
    return silu(gate) * up


@triton.jit
def inverse_sqrt(x):
    """1 / sqrt(x), both as IEEE has them, float32."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def add_halves(p):
    """[N, 2L] → [N, L]: entry j plus entry j + L."""
    halves = tl.reshape(p, (p.shape[0], 2, p.shape[1] // 2))
    low, high = tl.split(tl.permute(halves, (0, 2, 1)))
    return low + high


@triton.jit
def sum_of_eight(lanes):
    """The fixed tree that ends every sum: float32 [N, 8] → [N]."""
    even, odd = tl.split(add_halves(add_halves(lanes)))
    return even + odd


@triton.jit
def sum_of_sixteen(lanes):
    """float32 [N, 16] → [N]."""
    return sum_of_eight(add_halves(lanes))


@triton.jit
def quantize_groups(x):
    """float32 x [N, 256] → int8 codes [N, 256], float32 scales [N] and int16 sums of sixteen codes [N, 16].

    A group with an infinite or NaN input has the scale NaN and zero codes.
    """
    # As integers, the magnitudes of floats are in order, infinity and then NaN being the greatest.
    max_bits = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS, axis=1)
    maximum = max_bits.to(tl.float32, bitcast=True)
    is_zero = maximum < SMALLEST_MAXIMUM
    is_finite = max_bits < INFINITY_BITS
    scales = tl.where(is_zero, 0.0, tl.div_rn(maximum, LARGEST_CODE))
    scales = tl.where(is_finite, scales, float("nan"))
    scaled = x * tl.div_rn(LARGEST_CODE, maximum)[:, None]
    has_codes = is_finite & (maximum >= SMALLEST_MAXIMUM)
    codes = tl.where(has_codes[:, None], round_to_integer(scaled), 0.0).to(tl.int32)
    sums = tl.sum(tl.reshape(codes, (x.shape[0], SUMS_PER_GROUP, SUM_SIZE)), axis=2)
    return codes.to(tl.int8), scales, sums.to(tl.int16)
