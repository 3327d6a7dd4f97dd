"""Matrix products on the device: by the integer definition, and by sixteen accumulators for floats.

One row of activations is a matter of reading weights: packed codes meet packed activations, four at a time.
More rows go through tensor cores. Both compute the same integers, and then the same few float operations in
the same order, so that the result of a row does not depend on its company.
"""

import torch
import triton
import triton.language as tl

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.arithmetic.triton import GROUP_SIZE, SUMS_PER_GROUP
from coldstream.kernels.dequantize.triton import RowGeometry
from coldstream.kernels.linear import triton_blocks
from coldstream.kernels.linear.triton_products import float_products, row_products, tile_products
from coldstream.kernels.quant_tensor import QuantTensor

FEW_ROWS = 8  # up to here the weights are read once for each row of activations
NUM_STAGES = 2  # of the loop over blocks of a tile
UNROLL = 8  # steps of sixteen inputs


@triton.jit
def few_rows_kernel(
    weight,
    q,
    scales,
    sums,
    out,
    num_rows,
    row_bytes,
    num_cols,
    num_groups,
    out_stride,
    TYPE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SUB_BLOCK_SIZE: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS outputs of row program_id(1)."""
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q += token * num_groups * (GROUP_SIZE // 4)
    scales += token * num_groups
    sums += token * num_groups * (SUMS_PER_GROUP // 2)
    existing = tl.minimum(n, num_rows - 1)
    y = row_products(
        weight, existing, row_bytes, q, scales, sums, num_cols, TYPE, BLOCK_ELEMENTS, BLOCK_BYTES, UNITS
    )
    tl.store(out + token * out_stride + n, y, mask=n < num_rows)


@triton.jit(do_not_specialize=["num_tokens"])
def many_rows_kernel(
    weight,
    q,
    scales,
    sums,
    out,
    num_tokens,
    num_rows,
    row_bytes,
    num_cols,
    num_groups,
    out_stride,
    TYPE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SUB_BLOCK_SIZE: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: ROWS outputs of TOKENS rows."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    token = tl.minimum(t, num_tokens - 1).to(tl.int64)
    y = tile_products(
        weight,
        tl.minimum(n, num_rows - 1),
        row_bytes,
        q + token * num_groups * GROUP_SIZE,
        scales + token * num_groups,
        sums + token * num_groups * SUMS_PER_GROUP,
        num_cols,
        TYPE,
        BLOCK_ELEMENTS,
        BLOCK_BYTES,
        SUB_BLOCK_SIZE,
        UNITS,
    )
    is_valid = (n < num_rows)[:, None] & (t < num_tokens)[None, :]
    tl.store(out + token[None, :] * out_stride + n[:, None], y, mask=is_valid)


@triton.jit(do_not_specialize=["num_tokens"])
def float_kernel(
    weight,
    x,
    out,
    num_tokens,
    num_rows,
    row_bytes,
    num_cols,
    x_stride,
    out_stride,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One program: ROWS outputs of TOKENS rows."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    token = tl.minimum(t, num_tokens - 1).to(tl.int64)
    existing = tl.minimum(n, num_rows - 1)
    y = float_products(weight, existing, row_bytes, x + token * x_stride, num_cols, TYPE, UNROLL, TOKENS)
    is_valid = (t < num_tokens)[:, None] & (n < num_rows)[None, :]
    at = token[:, None] * out_stride + n[None, :]
    tl.store(out + at, tl.reshape(y, (TOKENS, ROWS)), mask=is_valid)


def linear(x: QuantActivations, weight: QuantTensor, out: torch.Tensor) -> None:
    """Writes x times `weight` [N, K], of one of the six integer types, to float32 `out` [T, N].

    x is padded with zeros to Kp inputs a row (see `quantize`), weight.blocks is contiguous, `out` has unit
    stride along N.
    """
    num_tokens, num_rows = out.shape
    if num_tokens == 0:
        return
    geometry = RowGeometry(weight.quant_type, weight.shape[-1])
    sizes = (num_rows, geometry.row_bytes, geometry.num_cols, x.scales.shape[-1], out.stride(0))
    if num_tokens <= FEW_ROWS:
        rows, warps = few_shape(num_rows)
        few_rows_kernel[(triton.cdiv(num_rows, rows), num_tokens)](
            as_words(weight.blocks, weight.quant_type),
            x.q.view(torch.int32),
            x.scales,
            x.sums.view(torch.int32),
            out,
            *sizes,
            **geometry.constants,
            UNITS=num_units(geometry),
            ROWS=rows,
            num_warps=warps,
            enable_fp_fusion=False,
        )
        return
    rows, tokens, warps = tile_shape(num_tokens)
    many_rows_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_tokens, tokens))](
        weight.blocks,
        x.q,
        x.scales,
        x.sums,
        out,
        num_tokens,
        *sizes,
        **geometry.constants,
        UNITS=num_units(geometry),
        ROWS=rows,
        TOKENS=tokens,
        num_warps=warps,
        num_stages=NUM_STAGES,
        enable_fp_fusion=False,
    )


def linear_float(x: torch.Tensor, weight: QuantTensor, out: torch.Tensor) -> None:
    """Writes float32 x [T, K] times `weight` [N, K] of type F32, F16 or BF16 to float32 `out` [T, N].

    weight.blocks is contiguous; x and `out` have unit stride along their last dimension.
    """
    num_tokens, num_rows = out.shape
    if num_tokens == 0:
        return
    geometry = RowGeometry(weight.quant_type, weight.shape[-1])
    rows, tokens, warps = float_shape(num_tokens)
    float_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_tokens, tokens))](
        weight.blocks,
        x,
        out,
        num_tokens,
        num_rows,
        geometry.row_bytes,
        geometry.num_cols,
        x.stride(0),
        out.stride(0),
        TYPE=int(weight.quant_type),
        ROWS=rows,
        TOKENS=tokens,
        UNROLL=UNROLL,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def as_words(blocks: torch.Tensor, quant_type: QuantType) -> torch.Tensor:
    """The bytes as the words in which `row_products` reads this type."""
    return blocks.view(torch.int32 if triton_blocks.has_aligned_blocks(quant_type) else torch.uint16)


def num_units(geometry: RowGeometry) -> int:
    """How many blocks of a row `row_products` takes at once."""
    num_blocks = geometry.num_cols // geometry.quant_type.block_elements
    return min(8, triton.next_power_of_2(num_blocks))


def few_shape(num_rows: int) -> tuple[int, int]:
    """Weight rows of one program for few rows of activations, and its warps; the fastest measured."""
    return (2, 1) if num_rows <= 32768 else (8, 4)


def tile_shape(num_tokens: int) -> tuple[int, int, int]:
    """Weight rows and rows of activations of one program that uses tensor cores, and its warps."""
    return 64, min(64, max(16, triton.next_power_of_2(num_tokens) // 2)), 4


def float_shape(num_tokens: int) -> tuple[int, int, int]:
    """The same for matrices of floats."""
    if num_tokens <= FEW_ROWS:
        return 2, 1, 1
    return (8, 4, 4) if num_tokens <= 256 else (16, 8, 4)
