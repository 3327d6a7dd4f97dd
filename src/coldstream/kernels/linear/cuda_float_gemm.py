"""GEMM with float weights."""

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import device_limits, overlaps
from coldstream.kernels.cuda.program import CudaProgram, Grid
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.quant_tensor import QuantTensor

THREADS = 256  # of a block
DEPTH = 64  # inputs of a stage
TOKEN_THREADS, ROW_THREADS = 4, 8  # of a warp
MAX_TILE_COLUMNS = 16  # of tokens next to each other, so that a wave reads little of either operand
ROW_BYTES = 16  # to which rows of both operands are aligned, unless each value is read by itself
NAMES: Mapping[QuantType, str] = {
    QuantType.F32: "Float32",
    QuantType.F16: "Float16",
    QuantType.BF16: "Bfloat16",
}


@dataclass(frozen=True)
class FloatTiling:
    """thread_side: tokens and rows of a thread. speed: on a full device, over that of large tiles."""

    thread_side: int
    speed: float

    @property
    def tile_tokens(self) -> int:
        return TOKEN_THREADS * self.thread_side

    @property
    def tile_rows(self) -> int:
        return ROW_THREADS * self.thread_side

    @property
    def shared_bytes(self) -> int:
        """Two stages."""
        return 2 * 4 * DEPTH * (self.tile_tokens + 1 + self.tile_rows + 1)

    def instance(self, quant_type: QuantType, *, is_aligned: bool) -> str:
        return f"float_gemm<FloatTiling<{NAMES[quant_type]}, {self.thread_side}, {str(is_aligned).lower()}>>"

    def grid(self, num_tokens: int, num_rows: int) -> Grid:
        columns = -(-num_tokens // self.tile_tokens)
        width = min(columns, MAX_TILE_COLUMNS)
        return (width, -(-num_rows // self.tile_rows), -(-columns // width))


# Speeds of 2,048 tokens on an H200, on average over types and two shapes: docs/notes/gpu-prefill.md.
LARGE, SMALL = TILINGS = FloatTiling(8, speed=1.0), FloatTiling(4, speed=0.72)
PROGRAM = CudaProgram(
    Path(__file__).with_name("float_gemm.cu"),
    (
        *(tiling.instance(quant_type, is_aligned=True) for tiling in TILINGS for quant_type in NAMES),
        *(SMALL.instance(quant_type, is_aligned=False) for quant_type in NAMES),
    ),
)


@declared_in("linear/float_gemm.cu")
class FloatJob(ctypes.Structure): ...


def float_linear_gemm(x: DeviceArray, weight: QuantTensor, out: DeviceArray) -> None:
    """Write float32 x [T, K] times an F32, F16 or BF16 weight [N, K] to float32 `out` [T, N]: one launch.

    x and out have unit stride along the last dimension, the weight's rows are adjacent. Any T; efficient from
    9 rows on, and where rows of x and of the weight begin on ROW_BYTES. Raises ValueError if shapes disagree,
    KeyError for another type.
    """
    num_rows, num_values = weight.shape
    num_tokens = x.shape[0]
    if tuple(x.shape) != (num_tokens, num_values) or tuple(out.shape) != (num_tokens, num_rows):
        raise ValueError(f"inputs {tuple(x.shape)} and outputs {tuple(out.shape)} do not fit {weight.shape}")
    for name, rows in (("x", x), ("out", out)):
        check_array(name, rows, "float32", is_contiguous=False)
        if rows.shape[1] > 1 and rows.stride(1) != 1:
            raise ValueError(f"{name}: the values of a row must be adjacent")
    if not weight.blocks.is_contiguous():
        raise ValueError("the rows of the weight must be adjacent")
    is_aligned = _has_aligned_rows(x, weight)
    tiling = choose_tiling(num_tokens, num_rows) if is_aligned else SMALL
    launch_float_gemm(PROGRAM, tiling, x, weight, out, is_aligned=is_aligned)


def launch_float_gemm(
    program: CudaProgram,
    tiling: FloatTiling,
    x: DeviceArray,
    weight: QuantTensor,
    out: DeviceArray,
    *,
    is_aligned: bool,
) -> None:
    """As `float_linear_gemm`, with this tiling."""
    job = FloatJob(
        x=x.data_ptr(),
        w=weight.blocks.data_ptr(),
        out=out.data_ptr(),
        num_tokens=x.shape[0],
        num_rows=weight.shape[0],
        num_values=weight.shape[1],
        x_stride=x.stride(0),
        out_stride=out.stride(0),
    )
    program.kernel(tiling.instance(weight.quant_type, is_aligned=is_aligned)).launch(
        tiling.grid(x.shape[0], weight.shape[0]),
        THREADS,
        (job,),
        shared_bytes=tiling.shared_bytes,
        overlap=overlaps(x.shape[0]),
    )


def _has_aligned_rows(x: DeviceArray, weight: QuantTensor) -> bool:
    """Whether all rows of x, of its inputs and of the weight begin on ROW_BYTES."""
    strides = (4 * x.stride(0), weight.quant_type.row_bytes(weight.shape[1]))
    return all(number % ROW_BYTES == 0 for number in (x.data_ptr(), weight.blocks.data_ptr(), *strides))


def choose_tiling(num_tokens: int, num_rows: int) -> FloatTiling:
    """That with which the busiest multiprocessor needs the least time. All give the same bits."""

    def time(tiling: FloatTiling) -> float:
        tiles = math.prod(tiling.grid(num_tokens, num_rows))
        outputs = tiling.tile_tokens * tiling.tile_rows
        return -(-tiles // device_limits().num_processors) * outputs / tiling.speed

    return min(TILINGS, key=time)
