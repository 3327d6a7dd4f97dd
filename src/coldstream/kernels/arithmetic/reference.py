"""The exact float32 arithmetic of docs/arithmetic.md, in PyTorch, bit for bit.

Nothing here is fast or differentiable: it is the reference for the C++ and GPU kernels.
"""

from functools import cache

import torch

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, SUM_SIZE, QuantActivations, activations_from

NUM_LANES = 16
LARGEST_CODE = 127
SMALLEST_MAXIMUM = 2.0**-100
EXPONENT_BIAS = 127
BITS_BEHIND_FLOAT32 = 2**29 - 1  # of float64
HALF_WAY = 2**28  # what these are between two of float32
SMALLEST_NORMAL = 2.0**-126  # of float32

EXP_MIN, EXP_MAX = -87.33654, 88.37626
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP_COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
LOG1P_COEFFICIENTS = (1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c of float32 tensors (broadcast), rounded once to float32."""
    a, b, c = a.double(), b.double(), c.double()
    total = torch.addcmul(c, a, b)  # the product is exact: 24 + 24 bits fit 53
    # Rounding it again gives what rounding once does, unless it was rounded to half way between two of
    # float32. Where those have fewer bits, that is elsewhere.
    is_half_way = (total.view(torch.int64) & BITS_BEHIND_FLOAT32) == HALF_WAY
    if (is_half_way | (total.abs() < SMALLEST_NORMAL)).any():
        total = _rounded_to_odd(a * b, c)
    return total.float()


def _rounded_to_odd(product: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """product + c, float64, so that rounding it again to fewer bits gives what rounding once does."""
    total = product + c
    # The exact rounding error of the addition (Knuth's two-sum).
    c_part = total - product
    error = (product - (total - c_part)) + (c - c_part)
    # Rounding twice is safe if the first rounding went to the neighbour with an odd last bit.
    is_even = (total.view(torch.int64) & 1) == 0
    towards_error = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), error))
    return torch.where(is_even & error.isfinite() & (error != 0), towards_error, total)


@cache
def constant(value: float) -> torch.Tensor:
    """`value` rounded to float32; the same tensor each time, which must not be written to."""
    return torch.tensor(value, dtype=torch.float32)


def inverse_sqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x), both rounded as in IEEE 754, float32."""
    # PyTorch's float32 root is off by a last bit for some inputs; one rounded from float64 never is.
    return 1 / x.double().sqrt().float()


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x by one polynomial, float32; NaN stays NaN."""
    x = x.clamp(constant(EXP_MIN), constant(EXP_MAX))
    n = torch.round(x * constant(LOG2_E))
    t = fma(n, constant(-LN2_HIGH), x)
    t = fma(n, constant(-LN2_LOW), t)
    result = constant(EXP_COEFFICIENTS[0]).expand_as(t)
    for coefficient in EXP_COEFFICIENTS[1:]:
        result = fma(result, t, constant(coefficient))
    power_of_two = (n.nan_to_num().int() + EXPONENT_BIAS) << 23
    return result * power_of_two.view(torch.float32)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(−x)), float32."""
    return 1 / (1 + exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x), float32."""
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), as max(x, 0) + log1p(e^−|x|)."""
    return torch.where(x > 0, x, 0.0) + log1p(exp(-x.abs()))


def log1p(t: torch.Tensor) -> torch.Tensor:
    """log(1 + t) for 0 ≤ t ≤ 1 by the series of 2 · artanh(t / (2 + t))."""
    s = t / (2 + t)
    z = s * s
    series = constant(LOG1P_COEFFICIENTS[0]).expand_as(z)
    for coefficient in LOG1P_COEFFICIENTS[1:]:
        series = fma(series, z, constant(coefficient))
    return (2 * s) * series


def sum_of_eight(lanes: torch.Tensor) -> torch.Tensor:
    """The fixed tree that ends every sum: float32 [..., 8] → [...]."""
    p0, p1, p2, p3, p4, p5, p6, p7 = lanes.unbind(-1)
    return ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7))


def sum_of_sixteen(lanes: torch.Tensor) -> torch.Tensor:
    """float32 [..., 16] → [...]."""
    return sum_of_eight(lanes[..., :8] + lanes[..., 8:])


def sum_lanes(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension of float32 x by sixteen accumulators: [..., K] → [...]."""
    lanes = x.new_zeros(*x.shape[:-1], NUM_LANES)
    for step in torch.split(x, NUM_LANES, dim=-1):
        lanes[..., : step.shape[-1]] += step
    return sum_of_sixteen(lanes)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Σ x² over the last dimension by sixteen accumulators of one fma each: [..., K] → [...]."""
    lanes = x.new_zeros(*x.shape[:-1], NUM_LANES)
    for step in torch.split(x, NUM_LANES, dim=-1):
        used = lanes[..., : step.shape[-1]]
        used.copy_(fma(step, step, used))
    return sum_of_sixteen(lanes)


def dot_lanes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every row of x times every row of y by sixteen accumulators: float32 [T, K], [N, K] → [T, N]."""
    x = x.unsqueeze(1)
    lanes = x.new_zeros(x.shape[0], y.shape[0], NUM_LANES)
    for x_step, y_step in zip(
        torch.split(x, NUM_LANES, dim=-1), torch.split(y, NUM_LANES, dim=-1), strict=True
    ):
        used = lanes[..., : x_step.shape[-1]]
        used.copy_(fma(x_step, y_step, used))
    return sum_of_sixteen(lanes)


def quantize_activations(x: torch.Tensor, scale_size: int = GROUP_SIZE) -> QuantActivations:
    """float32 x [T, K] as int8, with one scale for each `scale_size` inputs: GROUP_SIZE or BLOCK_SIZE.

    A group with an infinite or NaN input has the scale NaN and zero codes.
    """
    codes, scales = [], []
    for group in torch.split(x, scale_size, dim=-1):
        maximum = group.abs().amax(dim=-1, keepdim=True)
        is_zero = maximum < SMALLEST_MAXIMUM
        is_finite = maximum.isfinite()
        scale = torch.where(is_zero, 0.0, maximum / LARGEST_CODE)
        # PyTorch divides a Python number by multiplying with the rounded reciprocal.
        q = torch.round(group * (constant(LARGEST_CODE) / maximum))
        codes.append(torch.where(is_finite & ~is_zero, q, 0.0).to(torch.int8))
        scales.append(torch.where(is_finite, scale, torch.nan))
    q = torch.cat(codes, dim=-1)
    sums = [part.sum(dim=-1, keepdim=True, dtype=torch.int16) for part in torch.split(q, SUM_SIZE, dim=-1)]
    return QuantActivations(q, torch.cat(scales, dim=-1), torch.cat(sums, dim=-1))


def empty_activations(
    num_rows: int, cols: int, device: torch.device, scale_size: int = GROUP_SIZE
) -> QuantActivations:
    """`activations_from` in memory of PyTorch's on `device`, for kernels that write them."""

    def empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    return activations_from(empty, num_rows, cols, scale_size)
