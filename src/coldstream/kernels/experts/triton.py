"""Routed experts of a few tokens on the device: each (token, rank) pair reads its expert for itself.

An expert is found through tables of addresses, and a pair whose expert has an address 0 is left out: its rows
of the outputs stay as they are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.reference import GROUP_SIZE, QuantActivations
from coldstream.kernels.arithmetic.triton import SUMS_PER_GROUP
from coldstream.kernels.dequantize.triton import RowGeometry
from coldstream.kernels.linear.reference import INTEGER_TYPES
from coldstream.kernels.linear.triton import UNROLL, num_units
from coldstream.kernels.linear.triton_products import float_products, row_products

ROWS = 4  # of an expert's matrix, for one program
NUM_WARPS = 2
WORDS = tl.constexpr(tl.pointer_type(tl.int32))
HALF_WORDS = tl.constexpr(tl.pointer_type(tl.uint16))


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix [num_rows, num_cols] of every expert. addresses: int64 [experts], on the device."""

    addresses: torch.Tensor
    quant_type: QuantType
    num_rows: int
    num_cols: int

    @property
    def geometry(self) -> RowGeometry:
        return RowGeometry(self.quant_type, self.num_cols)

    @property
    def constants(self) -> tuple[int, int, int, int]:
        """Type, block elements, block bytes and the blocks that a few rows take at once."""
        elements, block_bytes = self.quant_type.block_elements, self.quant_type.block_bytes
        units = num_units(self.geometry) if self.quant_type in INTEGER_TYPES else 1
        return int(self.quant_type), elements, block_bytes, units


@triton.jit
def expert_products(
    address, n, row_bytes, x, scales, sums, num_cols, MATRIX: tl.constexpr, UNROLL_STEPS: tl.constexpr
):
    """Rows n [N] of the matrix at `address` times one row of activations: float32 [N].

    MATRIX is `ExpertMatrices.constants`. For a type of floats x is the address of float32 inputs, otherwise
    of int32 words of codes, with the addresses of their scales and (int32) sums.
    """
    TYPE: tl.constexpr = MATRIX[0]
    ELEMENTS: tl.constexpr = MATRIX[1]
    if ELEMENTS == 1:
        weight = address.to(tl.pointer_type(tl.uint8))
        at = x + tl.zeros((1,), tl.int32)
        return float_products(weight, n, row_bytes, at, num_cols, TYPE, UNROLL_STEPS, 1)
    elif MATRIX[2] % 16 == 0:  # as in `has_aligned_blocks`
        weight = tl.multiple_of(address, 16).to(WORDS)
        return row_products(
            weight, n, row_bytes, x, scales, sums, num_cols, TYPE, ELEMENTS, MATRIX[2], MATRIX[3]
        )
    else:
        weight = address.to(HALF_WORDS)
        return row_products(
            weight, n, row_bytes, x, scales, sums, num_cols, TYPE, ELEMENTS, MATRIX[2], MATRIX[3]
        )


@triton.jit
def gate_up_kernel(
    topk_ids,
    gate_addresses,
    up_addresses,
    x,
    scales,
    sums,
    out,
    num_ranks,
    num_rows,
    gate_row_bytes,
    up_row_bytes,
    num_cols,
    x_stride,
    num_groups,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL_STEPS: tl.constexpr,
):
    """One program: ROWS values of silu(gate · x) · (up · x) of pair program_id(0)."""
    pair = tl.program_id(0).to(tl.int64)
    token = pair // num_ranks
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(topk_ids + pair)
    gate_at, up_at = tl.load(gate_addresses + expert), tl.load(up_addresses + expert)
    x += token * x_stride
    if scales is not None:
        scales += token * num_groups
        sums += token * num_groups * (SUMS_PER_GROUP // 2)
    if (gate_at != 0) & (up_at != 0):
        rows = tl.minimum(n, num_rows - 1)
        gate = expert_products(gate_at, rows, gate_row_bytes, x, scales, sums, num_cols, GATE, UNROLL_STEPS)
        up = expert_products(up_at, rows, up_row_bytes, x, scales, sums, num_cols, UP, UNROLL_STEPS)
        tl.store(out + pair * num_rows + n, arithmetic.swiglu(gate, up), mask=n < num_rows)


@triton.jit
def down_kernel(
    topk_ids,
    addresses,
    x,
    scales,
    sums,
    out,
    num_rows,
    row_bytes,
    num_cols,
    x_stride,
    num_groups,
    DOWN: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL_STEPS: tl.constexpr,
):
    """One program: ROWS outputs of pair program_id(0), which has a row of activations of its own."""
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    address = tl.load(addresses + tl.load(topk_ids + pair))
    x += pair * x_stride
    if scales is not None:
        scales += pair * num_groups
        sums += pair * num_groups * (SUMS_PER_GROUP // 2)
    if address != 0:
        rows = tl.minimum(n, num_rows - 1)
        y = expert_products(address, rows, row_bytes, x, scales, sums, num_cols, DOWN, UNROLL_STEPS)
        tl.store(out + pair * num_rows + n, y, mask=n < num_rows)


def experts_gate_up(
    x: QuantActivations | torch.Tensor,
    topk_ids: torch.Tensor,
    gate: ExpertMatrices,
    up: ExpertMatrices,
    out: torch.Tensor,
) -> None:
    """Writes silu(gate_e x) · (up_e x) of every pair to contiguous float32 `out` [T · K, F].

    x holds T tokens: quantised and padded for integer types, or float32 [T, E] for F32, F16 and BF16, which
    gate and up are then both; topk_ids is contiguous int32 [T, K].
    """
    if topk_ids.numel() == 0:
        return
    inputs, x_stride, num_groups = kernel_inputs(x)
    gate_up_kernel[(topk_ids.numel(), triton.cdiv(gate.num_rows, ROWS))](
        topk_ids,
        gate.addresses,
        up.addresses,
        *inputs,
        out,
        topk_ids.shape[-1],
        gate.num_rows,
        gate.geometry.row_bytes,
        up.geometry.row_bytes,
        gate.num_cols,
        x_stride,
        num_groups,
        GATE=gate.constants,
        UP=up.constants,
        ROWS=ROWS,
        UNROLL_STEPS=UNROLL,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def experts_down(
    x: QuantActivations | torch.Tensor, topk_ids: torch.Tensor, down: ExpertMatrices, out: torch.Tensor
) -> None:
    """Writes down_e x of every pair to contiguous float32 `out` [T, K, E]; x has a row for each pair."""
    if topk_ids.numel() == 0:
        return
    inputs, x_stride, num_groups = kernel_inputs(x)
    down_kernel[(topk_ids.numel(), triton.cdiv(down.num_rows, ROWS))](
        topk_ids,
        down.addresses,
        *inputs,
        out,
        down.num_rows,
        down.geometry.row_bytes,
        down.num_cols,
        x_stride,
        num_groups,
        DOWN=down.constants,
        ROWS=ROWS,
        UNROLL_STEPS=UNROLL,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def kernel_inputs(
    x: QuantActivations | torch.Tensor,
) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], int, int]:
    """Addresses of activations for `expert_products`, the stride of a row, and its number of groups."""
    if isinstance(x, torch.Tensor):
        return (x, None, None), x.stride(0), 0
    num_groups = x.scales.shape[-1]
    words = (x.q.view(torch.int32), x.scales, x.sums.view(torch.int32))
    return words, num_groups * (GROUP_SIZE // 4), num_groups
