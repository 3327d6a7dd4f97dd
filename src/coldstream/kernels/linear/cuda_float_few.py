"""Products of float weights with 9 to 64 rows, several matrices in one launch."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.linear.cuda_float_many import NAMES
from coldstream.kernels.quant_tensor import QuantTensor

MAX_MATRICES = 8
THREADS, TILE_ROWS, TILE_TOKENS, STAGE_VALUES, STAGES = 128, 16, 8, 128, 4
CHUNK_BYTES = 16  # to which rows of x and of weights are aligned


def instance(quant_type: QuantType) -> str:
    return f"coldstream::float_few<coldstream::{NAMES[quant_type]}>"


PROGRAM = CudaProgram(Path(__file__).with_name("float_few.cu"), tuple(map(instance, NAMES)))


class FloatMatrix(ctypes.Structure):
    """As in float_few.cu."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("first_tile", ctypes.c_int32),
    )


class FloatMatrices(ctypes.Structure):
    """As in float_few.cu."""

    _fields_ = (("at", FloatMatrix * MAX_MATRICES), ("count", ctypes.c_int32))


class FloatInputs(ctypes.Structure):
    """As in float_few.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_values", ctypes.c_int32),
    )


def fits_float_few(x: torch.Tensor, weights: Sequence[QuantTensor]) -> bool:
    """Whether `float_linear_few` takes these: one type, and all rows begin on 16 bytes."""
    quant_type, cols = weights[0].quant_type, weights[0].shape[1]
    is_aligned = all(weight.blocks.data_ptr() % CHUNK_BYTES == 0 for weight in weights)
    return (
        all(weight.quant_type == quant_type for weight in weights)
        and len(weights) <= MAX_MATRICES
        and is_aligned
        and quant_type.row_bytes(cols) % CHUNK_BYTES == 0
        and x.data_ptr() % CHUNK_BYTES == 0
        and x.stride(0) % 4 == 0
    )


def float_linear_few(x: torch.Tensor, weights: Sequence[QuantTensor], outs: Sequence[torch.Tensor]) -> None:
    """Write float32 x [T, K] times each of F32, F16 or BF16 `weights` [N, K] to float32 `outs` [T, N].

    One launch, for what `fits_float_few`. Any T; efficient up to 64 rows. x and outs have unit stride along
    the last dimension, weights' rows are adjacent. Raises ValueError for others, KeyError for another type.
    """
    num_tokens, num_values = x.shape
    if len(weights) != len(outs) or not fits_float_few(x, weights):
        raise ValueError(f"{len(weights)} weights and {len(outs)} outputs are not one launch of aligned rows")
    table, first_tile = FloatMatrices(count=len(weights)), 0
    for entry, weight, out in zip(table.at, weights, outs, strict=False):
        num_rows = weight.shape[0]
        if weight.shape[1] != num_values or tuple(out.shape) != (num_tokens, num_rows):
            raise ValueError(
                f"inputs {tuple(x.shape)} and outputs {tuple(out.shape)} do not fit {weight.shape}"
            )
        if any(rows.dtype != torch.float32 or rows.stride(1) != 1 for rows in (x, out) if rows.shape[1] > 1):
            raise ValueError("inputs and outputs must be float32 with unit stride along a row")
        if not weight.blocks.is_contiguous():
            raise ValueError("the rows of the weight must be adjacent")
        entry.w, entry.out = weight.blocks.data_ptr(), out.data_ptr()
        entry.out_stride, entry.num_rows, entry.first_tile = out.stride(0), num_rows, first_tile
        first_tile += -(-num_rows // TILE_ROWS)
    quant_type = weights[0].quant_type
    PROGRAM.kernel(instance(quant_type)).launch(
        (first_tile, -(-num_tokens // TILE_TOKENS), 1),
        THREADS,
        (table, FloatInputs(x.data_ptr(), x.stride(0), num_tokens, num_values)),
        shared_bytes=STAGES * stage_bytes(quant_type),
        overlap=True,
    )


def stage_bytes(quant_type: QuantType) -> int:
    """Shared memory of a stage."""
    value_bytes = quant_type.row_bytes(1)
    return TILE_TOKENS * (4 * STAGE_VALUES + CHUNK_BYTES) + TILE_ROWS * (
        value_bytes * STAGE_VALUES + CHUNK_BYTES
    )
