"""Scales and caps the values of rows on a GPU: `scalars.cu`."""

from pathlib import Path

from coldstream.kernels.cuda.array import ArrayError, DeviceArray
from coldstream.kernels.cuda.program import CudaProgram

SCALE, SOFTCAP = "scale", "softcap"
PROGRAM = CudaProgram(Path(__file__).with_name("scalars.cu"), (SCALE, SOFTCAP))
THREADS = 256


def scale_cuda(x: DeviceArray, factor: float) -> None:
    """Multiplies float32 x [T, E], of adjacent columns, by `factor`; else ArrayError."""
    _launch(SCALE, x, factor)


def softcap_cuda(x: DeviceArray, cap: float) -> None:
    """Makes cap · tanh(x / cap) of float32 x [T, V], of adjacent columns; else ArrayError."""
    _launch(SOFTCAP, x, cap)


def _launch(kernel: str, x: DeviceArray, number: float) -> None:
    rows, cols = x.shape
    if x.stride(1) != 1:
        raise ArrayError(f"rows {(rows, cols)} have columns {x.stride(1)} apart, expected adjacent ones")
    grid = (-(-cols // THREADS), rows, 1)
    PROGRAM.kernel(kernel).launch(grid, THREADS, (x, x.stride(0), cols, number), overlap=True)
