"""RMS norm in Triton, with the quantisation after it in the same launch."""

import torch
import triton
import triton.language as tl

from coldstream.kernels.arithmetic import reference
from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.arithmetic.triton import GROUP_SIZE, NUM_LANES, SUMS_PER_GROUP
from coldstream.kernels.quantize.triton import store_quantized

GROUPS_AT_ONCE = 8
STEPS_AT_ONCE = tl.constexpr(16)  # loads in flight while the accumulators add up


@triton.jit
def inverse_norm(x, num_cols, eps):
    """1 / sqrt(mean of squares + eps) of the row at x."""
    lane = tl.arange(0, NUM_LANES)[None, :]
    p = tl.zeros((1, NUM_LANES), tl.float32)
    for begin in range(0, num_cols, NUM_LANES * STEPS_AT_ONCE):
        for step in tl.static_range(STEPS_AT_ONCE):
            at = begin + step * NUM_LANES + lane
            values = tl.load(x + at, mask=at < num_cols, other=0.0)
            p = tl.fma(values, values, p)
    mean = tl.div_rn(arithmetic.sum_of_sixteen(p), num_cols.to(tl.float32))
    return arithmetic.inverse_sqrt(mean + eps)


@triton.jit
def rms_norm_kernel(
    x, x_stride, weight, out, q, scales, sums, num_cols, num_groups, eps, GROUPS: tl.constexpr
):
    """One program: row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    s = inverse_norm(x, num_cols, eps)
    for first_group in range(0, num_groups, GROUPS):
        group = first_group + tl.arange(0, GROUPS)
        at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        is_valid = at < num_cols
        values = tl.load(x + at, mask=is_valid, other=0.0)
        scaled = (values * s[:, None]) * tl.load(weight + at, mask=is_valid, other=0.0)
        tl.store(out + row * num_cols + at, scaled, mask=is_valid)
        store_quantized(
            scaled,
            q + row * num_groups * GROUP_SIZE,
            scales + row * num_groups,
            sums + row * num_groups * SUMS_PER_GROUP,
            first_group,
            num_groups,
            GROUPS,
        )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, quantized: QuantActivations
) -> None:
    """The norm of the rows of float32 x [T, E], of unit stride along E, by `weight` [E].

    Writes contiguous float32 `out` [T, E] and `quantized` as `quantize` does.
    """
    num_rows, num_cols = x.shape
    if num_rows == 0:
        return
    num_groups = triton.cdiv(num_cols, reference.GROUP_SIZE)
    rms_norm_kernel[(num_rows,)](
        x,
        x.stride(0),
        weight,
        out,
        quantized.q,
        quantized.scales,
        quantized.sums,
        num_cols,
        num_groups,
        eps,
        GROUPS=min(GROUPS_AT_ONCE, triton.next_power_of_2(num_groups)),
        num_warps=8,
        enable_fp_fusion=False,
    )
