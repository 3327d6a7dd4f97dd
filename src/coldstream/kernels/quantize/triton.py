"""Activations as int8, on the device, for every product that follows."""

import torch
import triton
import triton.language as tl

from coldstream.kernels.arithmetic import reference
from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.arithmetic.triton import GROUP_SIZE, SUMS_PER_GROUP

GROUPS_PER_PROGRAM = 4


@triton.jit
def store_quantized(x, q, scales, sums, first_group, num_groups, GROUPS: tl.constexpr):
    """Quantises x [GROUPS, 256], the groups from `first_group` on of a row, and stores those that exist.

    q, scales and sums are the addresses of the row's own.
    """
    codes, scale, sum16 = arithmetic.quantize_groups(x)
    group = first_group + tl.arange(0, GROUPS)
    is_valid = group < num_groups
    at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    tl.store(q + at, codes, mask=is_valid[:, None])
    tl.store(scales + group, scale, mask=is_valid)
    at_sum = group[:, None] * SUMS_PER_GROUP + tl.arange(0, SUMS_PER_GROUP)[None, :]
    tl.store(sums + at_sum, sum16, mask=is_valid[:, None])


@triton.jit
def quantize_kernel(x, q, scales, sums, x_stride, num_cols, num_groups, GROUPS: tl.constexpr):
    """One program: GROUPS groups of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    first_group = tl.program_id(1) * GROUPS
    group = first_group + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    values = tl.load(x + row * x_stride + at, mask=at < num_cols, other=0.0)
    q += row * num_groups * GROUP_SIZE
    scales += row * num_groups
    sums += row * num_groups * SUMS_PER_GROUP
    store_quantized(values, q, scales, sums, first_group, num_groups, GROUPS)


def quantize(x: torch.Tensor, out: QuantActivations) -> None:
    """Quantises float32 x [T, K], of unit stride along K, into all of the contiguous `out`.

    With Kp = K rounded up to a multiple of 256: out.q int8 [T, Kp], out.scales float32 [T, Kp / 256] and
    out.sums int16 [T, Kp / 16]; what lies beyond K becomes 0.
    """
    num_rows, num_cols = x.shape
    if num_rows == 0:
        return
    num_groups = triton.cdiv(num_cols, reference.GROUP_SIZE)
    quantize_kernel[(num_rows, triton.cdiv(num_groups, GROUPS_PER_PROGRAM))](
        x,
        out.q,
        out.scales,
        out.sums,
        x.stride(0),
        num_cols,
        num_groups,
        GROUPS=GROUPS_PER_PROGRAM,
        enable_fp_fusion=False,
    )
