"""Rope angles on the device: cos and sin of every position are computed once, by the reference."""

from pathlib import Path

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram

PROGRAM = CudaProgram(Path(__file__).with_name("rope.cu"), ("gather_angles",))
THREADS = 128


def gather_angles_cuda(table: DeviceArray, positions: DeviceArray, out: DeviceArray) -> None:
    """Writes the rows `positions` (int32 [T]) of `table` to `out`.

    table: contiguous float32 [num_positions, rope dims / 2, 2], as `rope_angles` makes it; out: [T, rope dims
    / 2, 2]. The positions must lie in the table, which the kernel does not check.
    """
    half = table.shape[1]
    if not table.is_contiguous() or out.shape != (len(positions), half, 2) or not out.is_contiguous():
        raise ValueError(
            f"angles {tuple(out.shape)} from {tuple(table.shape)} for {len(positions)} positions"
        )
    blocks = -(-len(positions) * half // THREADS)
    args = (table, positions, len(positions), half, out)
    PROGRAM.kernel("gather_angles").launch((blocks, 1, 1), THREADS, args, overlap=True)
