"""Adds the bias of a projection to its rows on a GPU: `add_bias.cu`."""

from pathlib import Path

from coldstream.kernels.cuda.array import ArrayError, DeviceArray
from coldstream.kernels.cuda.program import CudaProgram

PROGRAM = CudaProgram(Path(__file__).with_name("add_bias.cu"), ("add_bias",))
THREADS = 256


def add_bias_cuda(x: DeviceArray, bias: DeviceArray) -> None:
    """Adds bias [out] to each row of x [T, out], both float32 with adjacent columns; else ArrayError."""
    rows, cols = x.shape
    if tuple(bias.shape) != (cols,) or x.stride(1) != 1 or bias.stride(0) != 1:
        raise ArrayError(f"{tuple(bias.shape)} is no bias of rows {(rows, cols)}, strides {x.stride()}")
    grid = (-(-cols // THREADS), rows, 1)
    PROGRAM.kernel("add_bias").launch(grid, THREADS, (x, x.stride(0), bias, cols), overlap=True)
