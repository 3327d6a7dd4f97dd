"""The float32 values of rows of a matrix of any type, on the device: embeddings."""

from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.quant_tensor import QuantTensor

MAX_THREADS = 128
WARP_SIZE = 32
RUN_VALUES = 8  # per thread


def traits_of(quant_type: QuantType) -> str:
    """What kernels decode a type by."""
    is_float = quant_type not in INTEGER_TYPES
    source = f"Floats<coldstream::{quant_type.name.lower()}>" if is_float else quant_type.name
    return f"coldstream::{source}"


def instance_of(quant_type: QuantType) -> str:
    """The instance of the kernel that reads a type."""
    return f"coldstream::dequantize_rows<{traits_of(quant_type)}>"


PROGRAM = CudaProgram(Path(__file__).with_name("dequantize.cu"), tuple(map(instance_of, QuantType)))


def dequantize_cuda(weight: QuantTensor, out: DeviceArray, row_ids: DeviceArray | None = None) -> None:
    """Writes the values of a matrix [rows, K], or of its rows `row_ids`, to float32 `out` [rows written, K].

    weight.blocks is contiguous; row_ids is contiguous int32 and names existing rows, which the kernel cannot
    check; `out` has unit stride along its last dimension. ValueError if shapes disagree, or if the matrix
    starts where the kernel cannot read it.
    """
    num_rows, cols = weight.shape[0] if row_ids is None else len(row_ids), weight.shape[1]
    if tuple(out.shape) != (num_rows, cols) or out.stride(1) != 1:
        raise ValueError(
            f"values of {num_rows} rows of {weight.shape} do not go into {tuple(out.shape)} with strides "
            f"{out.stride()}"
        )
    if not weight.blocks.is_contiguous() or weight.blocks.data_ptr() % weight.quant_type.alignment:
        raise ValueError(f"rows of {weight.quant_type.name} must be adjacent, and aligned as its blocks are")
    runs = -(-cols // RUN_VALUES)
    threads = min(MAX_THREADS, -(-runs // WARP_SIZE) * WARP_SIZE)
    args = (weight.blocks, row_ids, out, weight.quant_type.row_bytes(cols), cols, out.stride(0))
    PROGRAM.kernel(instance_of(weight.quant_type)).launch(
        (num_rows, -(-runs // threads), 1), threads, args, overlap=overlaps(num_rows)
    )
