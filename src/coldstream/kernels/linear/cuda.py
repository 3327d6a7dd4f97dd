"""Products of up to 64 rows with several matrices in one launch, in CUDA C++."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import GROUP_SIZE, QuantActivations
from coldstream.kernels.cuda.few_shapes import (
    FEW_TYPES,
    GROUP_TYPES,
    MAX_FEW_ROWS,
    PASS_COLS,
    SLACK_BYTES,
    MatrixShape,
    RingPlan,
    instance_for,
    matrix_shape,
    plan_ring,
    row_group_bytes,
    tile_shape,
)
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.linear.reference import BLOCK_TYPES, INTEGER_TYPES
from coldstream.kernels.quant_tensor import QuantTensor

MAX_MATRICES = 8
WARPS = 8
BLOCKS_PER_PROCESSOR = 2
SLICE_ROWS = 8  # of activations that meet the same unpacked weights
SLICES = (1, 2, 4, 8)  # that a block can take
MAX_TILE_ROWS = SLICE_ROWS * SLICES[-1]
MAX_TILE_VALUES = MAX_TILE_ROWS * 4096  # of rows; where a block may have 227 KiB, two parts
FLOAT_TILE_TOKENS, FLOAT_STAGE_VALUES = 16, 128  # rows of activations, and inputs of a stage
FLOAT_TILE_ROWS = {2: 4, 4: 16, 8: 16}  # rows of weights, by slices
FLOAT_STAGES = {2: 6, 4: 4, 8: 4}  # by slices
FLOAT_ROW_BYTES = 16  # to which rows of floats are aligned where there are more than eight
TILE_BLOCKS_PER_PROCESSOR = {1: 3, 2: 3, 4: 2, 8: 1}  # by slices, as in few.cu
PARTIAL_BYTES = WARPS * 32 * 16  # accumulators of a slice that warps exchange
ROW_BYTES = 16  # between quantised rows in shared memory
ONE, FEW = "coldstream::linear_one", "coldstream::linear_few"
PROGRAM = CudaProgram(
    Path(__file__).with_name("few.cu"),
    (
        instance_for(ONE, FEW_TYPES),
        *(instance_for(FEW, FEW_TYPES, slices) for slices in SLICES),
    ),
)


class LinearMatrix(ctypes.Structure):
    """As in few.cu."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int32),
        ("first_block", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("shape", MatrixShape),
    )


class LinearMatrices(ctypes.Structure):
    """As in few.cu."""

    _fields_ = (("at", LinearMatrix * MAX_MATRICES), ("count", ctypes.c_int32))


class LinearInputs(ctypes.Structure):
    """As in few.cu."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("stride", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("part_rows", ctypes.c_int32),
    )


def fits_few(weights: Sequence[QuantTensor], x: torch.Tensor) -> bool:
    """Whether `linear_few_cuda` is the best kernel for the float32 x [T, K], or its codes, times weights.

    It reads weights of integers once for each part of the rows; where their columns leave room for only a few
    in a part, kernels for many rows are faster. The choice is the same on every device, as plans are made
    without one.
    """
    num_rows, cols = x.shape
    fits = num_rows <= MAX_TILE_ROWS and num_rows * cols <= MAX_TILE_VALUES and len(weights) <= MAX_MATRICES
    return fits and (num_rows <= MAX_FEW_ROWS or all(has_aligned_floats(weight, x) for weight in weights))


def has_aligned_floats(weight: QuantTensor, x: torch.Tensor) -> bool:
    """Whether all rows of x and of a weight of floats begin on FLOAT_ROW_BYTES; true for one of integers."""
    if weight.quant_type not in PASS_COLS:
        return True
    row_bytes = weight.quant_type.row_bytes(weight.shape[1])
    return has_aligned_rows(x) and not (weight.blocks.data_ptr() | row_bytes) % FLOAT_ROW_BYTES


def _groups(weights: Sequence[QuantTensor]) -> int:
    """Groups of a row of codes; 0 if no weights need them."""
    has_codes = any(weight.quant_type in INTEGER_TYPES for weight in weights)
    return -(-weights[0].shape[1] // GROUP_SIZE) if has_codes else 0


def linear_few_cuda(
    weights: Sequence[QuantTensor],
    outs: Sequence[torch.Tensor],
    *,
    activations: QuantActivations | None = None,
    x: torch.Tensor | None = None,
) -> None:
    """Write x [T, K] times each of `weights` [N, K] into the `outs` float32 [T, N], in one launch.

    T ≤ MAX_TILE_ROWS. Weights of Q4_K, Q5_K and Q6_K need the quantised `activations` (laid out as
    `quantize/cuda.py` has it, with a scale for each 256 inputs), other types the float32 `x`, which the
    kernel quantises for blocks of 32. A weight's bytes are contiguous and aligned to 16 bytes for Q4_K and
    Q5_K, 4 for F32, otherwise 2. Rows of x and outs may have any stride, but rows of x are aligned to 16
    bytes for blocks of 32 and, like those of the weight, for floats with more than MAX_FEW_ROWS. ValueError
    for other types (dequantise them first) and shapes that do not fit.
    """
    num_rows = outs[0].shape[0]
    _check(weights, outs, activations, x, num_rows)
    limits, groups = device_limits(), _groups(weights)
    layout = _layout(limits, weights, num_rows, groups)
    max_blocks = limits.num_processors * layout.plan.blocks_per_processor // layout.num_parts(num_rows)
    inputs = _inputs(activations, x, num_rows, groups, layout.part_rows)
    _launch(_matrices(weights, layout, outs, max_blocks), inputs, layout)


@dataclass(frozen=True)
class _Layout:
    """How a launch is shared out.

    part_rows: rows of activations that a block takes; stage_bytes: for integer types; value_stage_bytes: of
    the warps' rings for others.
    """

    shapes: Sequence[MatrixShape]
    part_rows: int
    stage_bytes: int
    value_stage_bytes: int
    plan: RingPlan

    @property
    def slices(self) -> int:
        """Slices of `part_rows`, of the numbers that there are kernels for."""
        return slices_of(self.part_rows)

    def num_parts(self, num_rows: int) -> int:
        """Parts of `num_rows`, each with blocks of its own."""
        return -(-num_rows // self.part_rows)


def float_tiles(shape: MatrixShape, part_rows: int) -> int:
    """Tiles, each with a block, of a matrix of floats for more than a slice of rows; 0 for what has none."""
    if part_rows <= SLICE_ROWS or shape.type not in PASS_COLS:
        return 0
    tile_rows = FLOAT_TILE_ROWS[slices_of(part_rows)]
    return -(-int(shape.num_rows) // tile_rows) * -(-part_rows // FLOAT_TILE_TOKENS)


def slices_of(num_rows: int) -> int:
    """The fewest slices that a kernel takes at once and that hold so many rows."""
    return next(slices for slices in SLICES if num_rows <= slices * SLICE_ROWS)


def _layout(limits: DeviceLimits, weights: Sequence[QuantTensor], num_rows: int, groups: int) -> _Layout:
    """For all rows in one part, if they fit into shared memory together, otherwise for more parts."""
    part_rows, is_single = num_rows, num_rows == 1
    while part_rows > 0:
        layout = _layout_of(limits, weights, part_rows, groups, is_single=is_single)
        if layout is not None:
            return layout
        part_rows = part_rows // 2 if part_rows <= SLICE_ROWS else slices_of(part_rows) // 2 * SLICE_ROWS
    raise ValueError(f"a row of {groups * GROUP_SIZE} activations does not fit a block's shared memory")


def _layout_of(
    limits: DeviceLimits, weights: Sequence[QuantTensor], part_rows: int, groups: int, *, is_single: bool
) -> _Layout | None:
    """is_single: of one row, which has a kernel of its own; a part of one row has that of the others."""
    types = [weight.quant_type for weight in weights]
    walks = [matrix_shape if is_single or kind in PASS_COLS else tile_shape for kind in types]
    shapes = [walk(w.quant_type, w.shape[0], w.shape[1]) for walk, w in zip(walks, weights, strict=True)]
    stage_bytes = max(
        (s.stage_bytes for s, kind in zip(shapes, types, strict=True) if kind not in PASS_COLS), default=0
    )
    value_bytes = max(
        (s.stage_bytes for s, kind in zip(shapes, types, strict=True) if kind in PASS_COLS), default=0
    )
    # One block if it has a warp for every unit: the next kernel then fits beside it and loads its first
    # weights early.
    units = sum(float_tiles(shape, part_rows) or shape.num_units for shape in shapes)
    is_small = units <= limits.num_processors * (WARPS if is_single else 1)
    slices = slices_of(part_rows)
    most = BLOCKS_PER_PROCESSOR if is_single else TILE_BLOCKS_PER_PROCESSOR[slices]
    max_blocks = 1 if is_small else most
    row_bytes = groups * row_group_bytes(types, at_once=False)
    if is_single:
        stage_bytes = max(stage_bytes, value_bytes)
        plan = plan_ring(limits, WARPS * stage_bytes, row_bytes + SLACK_BYTES, max_blocks)
    else:
        others = part_rows * (row_bytes + ROW_BYTES) + slices * PARTIAL_BYTES + SLACK_BYTES
        if slices == 1:
            plan = plan_ring(limits, max(stage_bytes, WARPS * value_bytes), others, max_blocks)
        else:
            plan = plan_ring(
                limits, stage_bytes, others, max_blocks, least_bytes=float_tile_bytes(types, slices)
            )
    return None if plan is None else _Layout(shapes, part_rows, stage_bytes, value_bytes, plan)


def float_tile_bytes(types: Sequence[QuantType], slices: int) -> int:
    """Shared memory for a tile of floats in a launch with weights of `types`."""
    x_bytes = FLOAT_TILE_TOKENS * (4 * FLOAT_STAGE_VALUES + FLOAT_ROW_BYTES)
    rows, stages = FLOAT_TILE_ROWS[slices], FLOAT_STAGES[slices]
    row_bytes = [kind.row_bytes(FLOAT_STAGE_VALUES) + FLOAT_ROW_BYTES for kind in types if kind in PASS_COLS]
    return max((stages * (x_bytes + rows * each) for each in row_bytes), default=0)


def _inputs(
    activations: QuantActivations | None, x: torch.Tensor | None, num_rows: int, groups: int, part_rows: int
) -> LinearInputs:
    inputs = LinearInputs(num_rows=num_rows, groups=groups, part_rows=part_rows)
    if activations is not None:
        inputs.q, inputs.scales = activations.q.data_ptr(), activations.scales.data_ptr()
        inputs.sums = activations.sums.data_ptr()
    if x is not None:
        inputs.values, inputs.stride = x.data_ptr(), x.stride(0)
    return inputs


def _matrices(
    weights: Sequence[QuantTensor],
    layout: _Layout,
    outs: Sequence[torch.Tensor],
    max_blocks: int,
) -> LinearMatrices:
    """The kernel's table, with float matrices first, as their sums are the longest chains."""
    order = sorted(range(len(weights)), key=lambda i: weights[i].quant_type not in PASS_COLS)
    shapes = layout.shapes
    tiles = [float_tiles(shapes[i], layout.part_rows) for i in order]
    rest = [shapes[i] for i, count in zip(order, tiles, strict=True) if not count]
    shares = iter(share_blocks(rest, max_blocks - sum(tiles)))
    blocks = [count or next(shares) for count in tiles]
    table, first_block = LinearMatrices(count=len(weights)), 0
    for entry, (i, num_blocks) in zip(table.at, zip(order, blocks, strict=True), strict=False):
        entry.weight = weights[i].blocks.data_ptr()
        entry.out, entry.out_stride = outs[i].data_ptr(), outs[i].stride(0)
        entry.first_block, entry.num_blocks = first_block, num_blocks
        entry.shape = shapes[i]
        first_block += num_blocks
    return table


def share_blocks(shapes: Sequence[MatrixShape], max_blocks: int) -> list[int]:
    """Blocks for each matrix: at least one, at most one per unit, otherwise by their bytes."""
    num_bytes = [shape.num_rows * shape.row_bytes for shape in shapes]
    available = max(max_blocks, len(shapes))
    return [
        max(1, min(shape.num_units, available * part // sum(num_bytes)))
        for shape, part in zip(shapes, num_bytes, strict=True)
    ]


def _launch(table: LinearMatrices, inputs: LinearInputs, layout: _Layout) -> None:
    last, plan = table.at[table.count - 1], layout.plan
    types = [shape.type for shape in layout.shapes]
    name, sizes = instance_for(ONE, types), [layout.stage_bytes]
    if inputs.num_rows > 1:
        name = instance_for(FEW, types, layout.slices)
        sizes = [layout.stage_bytes, layout.value_stage_bytes]
    PROGRAM.kernel(name).launch(
        (last.first_block + last.num_blocks, layout.num_parts(inputs.num_rows), 1),
        WARPS * 32,
        (table, inputs, *sizes, plan.stages),
        shared_bytes=plan.shared_bytes,
        overlap=True,
    )


def _check(
    weights: Sequence[QuantTensor],
    outs: Sequence[torch.Tensor],
    activations: QuantActivations | None,
    x: torch.Tensor | None,
    num_rows: int,
) -> None:
    if not 0 < len(weights) == len(outs) <= MAX_MATRICES or not 0 < num_rows <= MAX_TILE_ROWS:
        raise ValueError(
            f"{len(weights)} weights, {len(outs)} outputs and {num_rows} rows are not one launch"
        )
    cols = weights[0].shape[1]
    for weight, out in zip(weights, outs, strict=True):
        if weight.shape[1] != cols or tuple(out.shape) != (num_rows, weight.shape[0]):
            raise ValueError(f"a weight {weight.shape} does not give an output {tuple(out.shape)}")
        if (activations if weight.quant_type in GROUP_TYPES else x) is None:
            raise ValueError(f"{weight.quant_type.name} weights need activations of the other kind")
        if x is not None and weight.quant_type in BLOCK_TYPES and not has_aligned_rows(x):
            raise ValueError(f"{weight.quant_type.name} weights need rows of activations on 16 bytes")
        if x is not None and num_rows > MAX_FEW_ROWS and not has_aligned_floats(weight, x):
            raise ValueError(f"{weight.quant_type.name} weights and {num_rows} rows need rows on 16 bytes")
        if not weight.blocks.is_contiguous() or weight.blocks.data_ptr() % alignment(weight.quant_type):
            raise ValueError(f"{weight.quant_type.name} weights need adjacent bytes at an aligned address")


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Whether every row of float32 x starts on 16 bytes."""
    return x.data_ptr() % 16 == 0 and (len(x) == 1 or x.stride(0) % 4 == 0)


def alignment(quant_type: QuantType) -> int:
    """Alignment of a matrix in bytes."""
    return 4 if quant_type == QuantType.F32 else quant_type.block_bytes & -quant_type.block_bytes
