"""Quantises activations in CUDA C++, and defines their layout in device memory."""

from pathlib import Path

from coldstream.kernels.arithmetic.quantised import (
    BLOCK_SIZE,
    GROUP_SIZE,
    QuantActivations,
    padded_cols,
)
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.quantize import COLS_MULTIPLE

INSTANCES = {size: f"coldstream::quantize<{size}>" for size in (GROUP_SIZE, BLOCK_SIZE)}
PROGRAM = CudaProgram(Path(__file__).with_name("quantize.cu"), tuple(INSTANCES.values()))
WARPS_PER_BLOCK = 4


def scale_size_of(x: QuantActivations) -> int:
    """Inputs per scale in rows of whole groups. ValueError if this is neither 256 nor 32."""
    rows, padded = x.q.shape
    for size in INSTANCES:
        if tuple(x.scales.shape) == (rows, padded // size):
            return size
    raise ValueError(
        f"scales {tuple(x.scales.shape)} are not one for each 256 or 32 of {(rows, padded)} codes"
    )


def quantize_cuda(x: DeviceArray, out: QuantActivations, *, tokens: int | None = None) -> None:
    """Quantise the rows of float32 x [T, K] into `out` (see `activations_from`), the padding as zeros.

    The shape of `out.scales` gives the inputs per scale. tokens: of the step, if rows are its pairs. K is a
    multiple of 32; rows of x are aligned to 16 bytes. ValueError otherwise.
    """
    rows, cols = x.shape
    if cols % COLS_MULTIPLE or x.stride(1) != 1 or (x.stride(0) * 4 | x.data_ptr()) % 16:
        raise ValueError(f"cannot quantise rows of {cols} values with strides {x.stride()}")
    padded = padded_cols(cols)
    if tuple(out.q.shape) != (rows, padded) or not out.q.is_contiguous():
        raise ValueError(f"the codes of {rows} rows of {cols} values need [{rows}, {padded}] adjacent bytes")
    groups = padded // GROUP_SIZE
    PROGRAM.kernel(INSTANCES[scale_size_of(out)]).launch(
        (rows, -(-groups // WARPS_PER_BLOCK), 1),
        WARPS_PER_BLOCK * 32,
        (x, x.stride(0), cols, padded, out.q, out.scales, out.sums),
        overlap=overlaps(rows if tokens is None else tokens),
    )
