"""The float32 values of matrices of any type, on the device: embeddings, and types without a product."""

from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.dequantize.code_tables import TABLES
from coldstream.kernels.quant_tensor import QuantTensor

MAX_THREADS = 128
WARP_SIZE = 32
RUN_VALUES = 8  # per thread
ALIGNMENTS = {QuantType.Q4_K: 16, QuantType.Q5_K: 16, QuantType.MXFP4: 1, QuantType.F32: 4}  # others: 2
TABLE_ALIGNMENT = 8


def instance_of(quant_type: QuantType) -> str:
    """The instance of the kernel that reads a type."""
    geometry = f"{int(quant_type)}, {quant_type.block_elements}, {quant_type.block_bytes}"
    return f"coldstream::dequantize_rows<{geometry}>"


PROGRAM = CudaProgram(Path(__file__).with_name("dequantize.cu"), tuple(map(instance_of, QuantType)))


def dequantize_cuda(
    weight: QuantTensor, out: DeviceArray, table: DeviceArray | None, row_ids: DeviceArray | None = None
) -> None:
    """Writes the values of a matrix [rows, K], or of its rows `row_ids`, to float32 `out` [rows written, K].

    weight.blocks is contiguous; row_ids is contiguous int32 and names existing rows, which the kernel cannot
    check; `out` has unit stride along its last dimension; `table` is `code_table` of the type. ValueError if
    shapes disagree, or if the matrix starts where the kernel cannot read it.
    """
    num_rows = weight.shape[0] if row_ids is None else len(row_ids)
    if tuple(out.shape) != (num_rows, weight.shape[1]) or out.stride(1) != 1:
        raise ValueError(
            f"values of {num_rows} rows of {weight.shape} do not go into {tuple(out.shape)} with strides "
            f"{out.stride()}"
        )
    if not weight.blocks.is_contiguous() or weight.blocks.data_ptr() % ALIGNMENTS.get(weight.quant_type, 2):
        raise ValueError(f"rows of {weight.quant_type.name} must be adjacent, and aligned as its blocks are")
    rows = (num_rows, 1, out.stride(0))
    _launch(weight.quant_type, rows, out, table, weight=weight.blocks, row_ids=row_ids)


def dequantize_matrices_cuda(
    quant_type: QuantType,
    addresses: DeviceArray,
    matrix_ids: DeviceArray,
    out: DeviceArray,
    table: DeviceArray | None,
) -> None:
    """Writes the values of the matrices at addresses[matrix_ids[m]] to contiguous float32 `out` [M, N, K].

    addresses is int64 [experts], matrix_ids contiguous int32 [M]; each address is that of N adjacent rows of
    K values, aligned as blocks of the type are, or 0, and then the matrix's values are not written.
    ValueError if shapes disagree.
    """
    num_matrices, num_rows, _ = out.shape
    if len(matrix_ids) != num_matrices or not out.is_contiguous():
        raise ValueError(f"{len(matrix_ids)} matrices need as many adjacent ones, not {tuple(out.shape)}")
    rows = (num_rows, num_matrices, out.shape[2])
    _launch(quant_type, rows, out, table, addresses=addresses, matrix_ids=matrix_ids)


def _launch(
    quant_type: QuantType,
    rows: tuple[int, int, int],
    out: DeviceArray,
    table: DeviceArray | None,
    *,
    weight: DeviceArray | None = None,
    addresses: DeviceArray | None = None,
    matrix_ids: DeviceArray | None = None,
    row_ids: DeviceArray | None = None,
) -> None:
    """rows: of a matrix, the number of matrices, and the elements from one row of `out` to the next."""
    _check_table(quant_type, table)
    num_rows, num_matrices, row_stride = rows
    cols = out.shape[-1]
    runs = -(-cols // RUN_VALUES)
    threads = min(MAX_THREADS, -(-runs // WARP_SIZE) * WARP_SIZE)
    args = (
        weight,
        addresses,
        matrix_ids,
        row_ids,
        table,
        out,
        quant_type.row_bytes(cols),
        cols,
        row_stride,
    )
    PROGRAM.kernel(instance_of(quant_type)).launch(
        (num_rows, -(-runs // threads), num_matrices),
        threads,
        args,
        overlap=overlaps(num_rows * num_matrices),
    )


def _check_table(quant_type: QuantType, table: DeviceArray | None) -> None:
    if quant_type not in TABLES:
        if table is not None:
            raise ValueError(f"{quant_type.name} has no table of codes")
    elif table is None or table.data_ptr() % TABLE_ALIGNMENT:
        raise ValueError(f"{quant_type.name} needs the table of its codes, on {TABLE_ALIGNMENT} bytes")
