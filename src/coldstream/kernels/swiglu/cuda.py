"""The gated activation in CUDA C++, with the quantisation after it in the same launch."""

from pathlib import Path

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations, padded_cols
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.quantize.cuda import INSTANCES, scale_size_of

PROGRAM = CudaProgram(
    Path(__file__).with_name("swiglu.cu"),
    tuple(f"swiglu_rows<{aligned}, {size}>" for aligned in ("true", "false") for size in INSTANCES),
)
MAX_WARPS = 4
WARP_SIZE = 32
ALONE_ROWS = 64  # up to here every group of a row may have its own multiprocessor


def swiglu_cuda(
    gate: DeviceArray, up: DeviceArray, out: DeviceArray | None, quantized: QuantActivations | None
) -> None:
    """silu(gate) · up, both float32 [T, F] with any row stride, as floats, quantised, or both.

    Writes contiguous float32 `out` [T, F] and `quantized` (see `activations_from`; the shape of its scales
    gives the values per scale), where given. ValueError if shapes disagree.
    """
    rows, cols = gate.shape
    padded = padded_cols(cols)
    if up.shape != gate.shape or gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError(
            f"gates {tuple(gate.shape)} and values {tuple(up.shape)} differ, or have strided columns"
        )
    if out is not None and (out.shape != gate.shape or not out.is_contiguous()):
        raise ValueError(f"an output {tuple(out.shape)} for rows {(rows, cols)}")
    if quantized is not None and tuple(quantized.q.shape) != (rows, padded):
        raise ValueError(f"codes of shape {tuple(quantized.q.shape)} for rows {(rows, cols)}")
    addresses = gate.data_ptr() | up.data_ptr() | (0 if out is None else out.data_ptr())
    aligned = addresses % 16 == 0 and (cols | gate.stride(0) | up.stride(0)) % 4 == 0
    groups = padded // GROUP_SIZE
    warps = 1 if rows <= ALONE_ROWS else min(MAX_WARPS, groups)
    codes = (None, None, None) if quantized is None else (quantized.q, quantized.scales, quantized.sums)
    scale_size = GROUP_SIZE if quantized is None else scale_size_of(quantized)
    PROGRAM.kernel(f"swiglu_rows<{str(aligned).lower()}, {scale_size}>").launch(
        (rows, -(-groups // warps), 1),
        warps * WARP_SIZE,
        (gate, gate.stride(0), up, up.stride(0), cols, padded, out, *codes),
        overlap=overlaps(rows),
    )
