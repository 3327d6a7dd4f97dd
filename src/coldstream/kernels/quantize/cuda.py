"""Quantised activations in CUDA C++, and how they lie in the device's memory."""

from pathlib import Path

import torch

from coldstream.kernels.arithmetic.reference import GROUP_SIZE, SUM_SIZE, QuantActivations
from coldstream.kernels.cuda.program import CudaProgram

PROGRAM = CudaProgram(Path(__file__).with_name("quantize.cu"), ("coldstream::quantize",))
WARPS_PER_BLOCK = 4
COLS_MULTIPLE = 32  # every integer type has blocks of 32 or 256


def padded_cols(cols: int) -> int:
    """Codes in a row of `cols` activations on the device: whole groups."""
    return -(-cols // GROUP_SIZE) * GROUP_SIZE


def empty_activations(num_rows: int, cols: int, device: torch.device) -> QuantActivations:
    """Unwritten rows: q int8 [T, Kp], scales float32 [T, Kp / 256], sums int16 [T, Kp / 16], contiguous."""
    padded = padded_cols(cols)
    return QuantActivations(
        torch.empty(num_rows, padded, dtype=torch.int8, device=device),
        torch.empty(num_rows, padded // GROUP_SIZE, device=device),
        torch.empty(num_rows, padded // SUM_SIZE, dtype=torch.int16, device=device),
    )


def quantize_cuda(x: torch.Tensor, out: QuantActivations) -> None:
    """Quantise the rows of float32 x [T, K] into `out` (see `empty_activations`), the padding as zeros.

    K is a multiple of 32; rows of x start on 16 bytes. ValueError otherwise.
    """
    rows, cols = x.shape
    if cols % COLS_MULTIPLE or x.stride(1) != 1 or (x.stride(0) * 4 | x.data_ptr()) % 16:
        raise ValueError(f"cannot quantise rows of {cols} values with strides {x.stride()}")
    padded = padded_cols(cols)
    if tuple(out.q.shape) != (rows, padded) or not out.q.is_contiguous():
        raise ValueError(f"the codes of {rows} rows of {cols} values need [{rows}, {padded}] adjacent bytes")
    groups = padded // GROUP_SIZE
    PROGRAM.kernel("coldstream::quantize").launch(
        (rows, -(-groups // WARPS_PER_BLOCK), 1),
        WARPS_PER_BLOCK * 32,
        (x, x.stride(0), cols, padded, out.q, out.scales, out.sums),
        overlap=True,
    )
