"""The gated activation in Triton, with the quantisation after it in the same launch."""

import torch
import triton
import triton.language as tl

from coldstream.kernels.arithmetic import reference
from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.arithmetic.triton import GROUP_SIZE, SUMS_PER_GROUP
from coldstream.kernels.quantize.triton import store_quantized

GROUPS_PER_PROGRAM = 2


@triton.jit
def swiglu_kernel(
    gate, gate_stride, up, up_stride, q, scales, sums, num_cols, num_groups, GROUPS: tl.constexpr
):
    """One program: GROUPS groups of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    first_group = tl.program_id(1) * GROUPS
    group = first_group + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    is_valid = at < num_cols
    gates = tl.load(gate + row * gate_stride + at, mask=is_valid, other=0.0)
    ups = tl.load(up + row * up_stride + at, mask=is_valid, other=0.0)
    store_quantized(
        arithmetic.swiglu(gates, ups),
        q + row * num_groups * GROUP_SIZE,
        scales + row * num_groups,
        sums + row * num_groups * SUMS_PER_GROUP,
        first_group,
        num_groups,
        GROUPS,
    )


def swiglu(gate: torch.Tensor, up: torch.Tensor, quantized: QuantActivations) -> None:
    """Writes silu(gate) · up, quantised as `quantize` does; both are float32 [T, F] of unit column stride."""
    num_rows, num_cols = gate.shape
    if num_rows == 0:
        return
    num_groups = triton.cdiv(num_cols, reference.GROUP_SIZE)
    swiglu_kernel[(num_rows, triton.cdiv(num_groups, GROUPS_PER_PROGRAM))](
        gate,
        gate.stride(0),
        up,
        up.stride(0),
        quantized.q,
        quantized.scales,
        quantized.sums,
        num_cols,
        num_groups,
        GROUPS=GROUPS_PER_PROGRAM,
        enable_fp_fusion=False,
    )
