"""The gated activation in Triton, with the quantisation after it in the same launch."""

import torch
import triton
import triton.language as tl

from coldstream.kernels.arithmetic import reference
from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.arithmetic.triton import GROUP_SIZE, SUMS_PER_GROUP
from coldstream.kernels.quantize.triton import store_quantized


@triton.jit
def swiglu_kernel(
    gate, gate_stride, up, up_stride, out, q, scales, sums, num_cols, num_groups,
    FLOATS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """One program: group program_id(1) of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) + tl.arange(0, 1)
    at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    is_valid = at < num_cols
    gates = tl.load(gate + row * gate_stride + at, mask=is_valid, other=0.0)
    ups = tl.load(up + row * up_stride + at, mask=is_valid, other=0.0)
    activated = arithmetic.swiglu(gates, ups)
    if FLOATS:
        tl.store(out + row * num_cols + at, activated, mask=is_valid)
    if CODES:
        store_quantized(
            activated,
            q + row * num_groups * GROUP_SIZE,
            scales + row * num_groups,
            sums + row * num_groups * SUMS_PER_GROUP,
            tl.program_id(1),
            num_groups,
            1,
        )


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None, quantized: QuantActivations | None
) -> None:
    """silu(gate) · up, both float32 [T, F] of unit column stride, as floats, quantised, or both.

    Writes contiguous float32 `out` [T, F] and `quantized` as `quantize` does, where given.
    """
    num_rows, num_cols = gate.shape
    if num_rows == 0:
        return
    num_groups = triton.cdiv(num_cols, reference.GROUP_SIZE)
    codes = (None, None, None) if quantized is None else (quantized.q, quantized.scales, quantized.sums)
    swiglu_kernel[(num_rows, num_groups)](
        gate, gate.stride(0), up, up.stride(0), out, *codes, num_cols, num_groups,
        FLOATS=out is not None, CODES=quantized is not None, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
