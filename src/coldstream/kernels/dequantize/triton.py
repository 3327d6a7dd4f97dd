"""The float32 values of matrices of any type, on the device: what types without an integer product need."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize import triton_blocks as blocks
from coldstream.kernels.quant_tensor import QuantTensor

F32, F16 = tl.constexpr(int(QuantType.F32)), tl.constexpr(int(QuantType.F16))
BF16 = tl.constexpr(int(QuantType.BF16))
LARGEST_CHUNK = 1024  # values of one program
NUM_WARPS = 4


@dataclass(frozen=True)
class RowGeometry:
    """What a kernel needs to know about rows of `num_cols` values of a type, at compile time."""

    quant_type: QuantType
    num_cols: int

    @property
    def row_bytes(self) -> int:
        return self.quant_type.row_bytes(self.num_cols)

    @property
    def constants(self) -> dict[str, int]:
        elements = self.quant_type.block_elements
        return {
            "TYPE": int(self.quant_type),
            "BLOCK_ELEMENTS": elements,
            "BLOCK_BYTES": self.quant_type.block_bytes,
            "SUB_BLOCK_SIZE": elements // blocks.num_sub_blocks(self.quant_type),
        }

    @property
    def chunk(self) -> int:
        """Values that a program writes: blocks are never cut off, rows of floats may end within."""
        if self.quant_type.block_elements == 1:
            return LARGEST_CHUNK
        return min(LARGEST_CHUNK, self.num_cols & -self.num_cols)


@triton.jit
def float_value(TYPE: tl.constexpr, p, at, is_valid):
    """float32 value `at` of the row of floats at address p; 0 where it is not valid."""
    if TYPE == F32:
        return tl.load(p.to(tl.pointer_type(tl.float32)) + at, mask=is_valid, other=0.0)
    elif TYPE == F16:
        return tl.load(p.to(tl.pointer_type(tl.float16)) + at, mask=is_valid, other=0.0).to(tl.float32)
    else:
        tl.static_assert(TYPE == BF16)
        bits = tl.load(p.to(tl.pointer_type(tl.uint16)) + at, mask=is_valid, other=0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def dequantize_kernel(
    weight,
    addresses,
    matrix_ids,
    row_ids,
    table,
    out,
    row_bytes,
    num_cols,
    out_stride,
    TYPE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SUB_BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: CHUNK values of row program_id(0) of matrix program_id(2)."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(2)
    source = row
    if row_ids is not None:
        source = tl.load(row_ids + row).to(tl.int64)
    p = weight
    if addresses is not None:
        address = tl.load(addresses + tl.load(matrix_ids + matrix))
        if address == 0:
            return
        p = address.to(tl.pointer_type(tl.uint8))
    p += source * row_bytes
    element = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_valid = element < num_cols
    if BLOCK_ELEMENTS == 1:
        values = float_value(TYPE, p, element, is_valid)
    else:
        block = p + element // BLOCK_ELEMENTS * BLOCK_BYTES
        values = blocks.value(TYPE, block, element % BLOCK_ELEMENTS, SUB_BLOCK_SIZE, table)
    out_row = matrix * tl.num_programs(0) + row
    tl.store(out + out_row * out_stride + element, values, mask=is_valid)


def dequantize(
    weight: QuantTensor, out: torch.Tensor, table: torch.Tensor | None, row_ids: torch.Tensor | None = None
) -> None:
    """Writes the values of a matrix [rows, K], or of its rows `row_ids`, to float32 `out` [rows written, K].

    weight.blocks is contiguous; row_ids is int32 and names existing rows; `out` has unit stride along its
    last dimension; `table` is `code_table(weight.quant_type, device)`.
    """
    geometry = RowGeometry(weight.quant_type, weight.shape[-1])
    _launch(geometry, (out.shape[0], 1), out, table, weight=weight.blocks, row_ids=row_ids)


def dequantize_matrices(
    quant_type: QuantType,
    addresses: torch.Tensor,
    matrix_ids: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor | None,
) -> None:
    """Writes the values of the matrices at addresses[matrix_ids[m]] to contiguous float32 `out` [M, N, K].

    addresses is int64 [experts], matrix_ids int32 [M]; each address is that of N adjacent rows of K values,
    or 0: then the matrix's values are left as they are.
    """
    num_matrices, num_rows, num_cols = out.shape
    geometry = RowGeometry(quant_type, num_cols)
    grid = (num_rows, num_matrices)
    _launch(geometry, grid, out.flatten(0, 1), table, addresses=addresses, matrix_ids=matrix_ids)


def _launch(
    geometry: RowGeometry,
    rows_and_matrices: tuple[int, int],
    out: torch.Tensor,
    table: torch.Tensor | None,
    *,
    weight: torch.Tensor | None = None,
    addresses: torch.Tensor | None = None,
    matrix_ids: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
) -> None:
    num_rows, num_matrices = rows_and_matrices
    if num_rows * num_matrices == 0:
        return
    grid = (num_rows, triton.cdiv(geometry.num_cols, geometry.chunk), num_matrices)
    dequantize_kernel[grid](
        weight,
        addresses,
        matrix_ids,
        row_ids,
        table,
        out,
        geometry.row_bytes,
        geometry.num_cols,
        out.stride(0),
        **geometry.constants,
        CHUNK=geometry.chunk,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
