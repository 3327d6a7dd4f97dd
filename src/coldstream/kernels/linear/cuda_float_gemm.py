"""GEMM with float weights."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.quant_tensor import QuantTensor

THREADS = 512
NAMES: Mapping[QuantType, str] = {
    QuantType.F32: "Float32",
    QuantType.F16: "Float16",
    QuantType.BF16: "Bfloat16",
}


@dataclass(frozen=True)
class FloatTiling:
    """Outputs of a thread and inputs of a stage, as in float_gemm.cu."""

    thread_tokens: int
    thread_rows: int
    depth: int

    def instance(self, quant_type: QuantType) -> str:
        arguments = f"{NAMES[quant_type]}, {self.thread_tokens}, {self.thread_rows}, {self.depth}"
        return f"float_gemm<FloatTiling<{arguments}>>"

    def grid(self, num_tokens: int, num_rows: int) -> tuple[int, int, int]:
        return (-(-num_rows // (4 * self.thread_rows)), -(-num_tokens // (8 * self.thread_tokens)), 1)


LARGE, SMALL = FloatTiling(8, 8, 32), FloatTiling(4, 4, 64)
PROGRAM = CudaProgram(
    Path(__file__).with_name("float_gemm.cu"),
    tuple(tiling.instance(quant_type) for tiling in (LARGE, SMALL) for quant_type in NAMES),
)


@declared_in("linear/float_gemm.cu")
class FloatJob(ctypes.Structure): ...


def float_linear_gemm(x: DeviceArray, weight: QuantTensor, out: DeviceArray) -> None:
    """Write float32 x [T, K] times an F32, F16 or BF16 weight [N, K] to float32 `out` [T, N]: one launch.

    x and out have unit stride along the last dimension, the weight's rows are adjacent. Any T; efficient from
    9 rows on. Raises ValueError if shapes disagree, KeyError for another type.
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
    job = FloatJob(
        x=x.data_ptr(),
        w=weight.blocks.data_ptr(),
        out=out.data_ptr(),
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_values=num_values,
        x_stride=x.stride(0),
        out_stride=out.stride(0),
    )
    tiling = choose_tiling(num_tokens, num_rows)
    PROGRAM.kernel(tiling.instance(weight.quant_type)).launch(
        tiling.grid(num_tokens, num_rows), THREADS, (job,)
    )


def choose_tiling(num_tokens: int, num_rows: int) -> FloatTiling:
    """Large tiles if there are enough of them for every multiprocessor. Both give the same bits."""
    columns, rows, _ = LARGE.grid(num_tokens, num_rows)
    return LARGE if columns * rows >= device_limits().num_processors else SMALL
