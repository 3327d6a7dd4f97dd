"""Products of up to 64 rows with several matrices in one launch, in CUDA C++."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.cuda.program import Argument, CudaProgram
from coldstream.kernels.cuda.skinny_shapes import (
    GROUP_TYPES,
    MAX_GEMV_ROWS,
    PASS_COLS,
    SKINNY_TYPES,
    MatrixShape,
    instance_for,
)
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.linear.integer_types import BLOCK_TYPES, INTEGER_TYPES
from coldstream.kernels.linear.skinny_layouts import (
    FLOAT_ROW_BYTES,
    MAX_LARGE_FLOAT_ROWS,
    MAX_ROWS,
    MAX_TILE_ROWS,
    MIN_LARGE_SIDE,
    PARTED_TYPES,
    SETS,
    Layout,
    Walk,
    Weight,
    are_large_floats,
    is_large,
    layout_for,
)
from coldstream.kernels.quant_tensor import QuantTensor

MAX_MATRICES = 8
MAX_FLOAT_VALUES = MAX_TILE_ROWS * 4096  # of a block's rows that a matrix of floats meets
ONE, ROWS, SKINNY = "coldstream::linear_one", "coldstream::linear_rows", "coldstream::linear_skinny"
FLOATS, WIDE = "coldstream::linear_floats", "coldstream::linear_wide"
BY_WALK = {Walk.ONE: ONE, Walk.ROWS: ROWS, Walk.FLOATS: FLOATS, Walk.WIDE: WIDE}  # of kernels without numbers
PARTS = "coldstream::linear_parts"
INSTANCES = {
    walk: tuple((slices // count, count) for slices, count in sets.items()) for walk, sets in SETS.items()
}  # slices of a set of warps, and sets
PROGRAM = CudaProgram(
    Path(__file__).with_name("skinny.cu"),
    (
        *(instance_for(kernel, {kind}) for kernel in (ONE, ROWS) for kind in sorted(SKINNY_TYPES)),
        *(instance_for(FLOATS, {kind}) for kind in sorted(PASS_COLS)),
        *(instance_for(WIDE, {kind}) for kind in sorted(GROUP_TYPES)),
        *(
            instance_for(SKINNY, {kind}, *numbers)
            for numbers in INSTANCES[Walk.TILES]
            for kind in sorted(SKINNY_TYPES)
        ),
    ),
    is_slow=True,
)
PARTS_PROGRAM = CudaProgram(
    Path(__file__).with_name("parts.cu"),
    tuple(
        instance_for(PARTS, {kind}, *numbers)
        for numbers in INSTANCES[Walk.PARTS]
        for kind in sorted(SKINNY_TYPES)
    ),
    is_slow=True,
)


@declared_in("linear/skinny.cuh")
class LinearMatrix(ctypes.Structure): ...


@declared_in("linear/skinny.cuh")
class LinearMatrices(ctypes.Structure): ...


@declared_in("linear/parts.cu")
class BlockRows(ctypes.Structure): ...


@declared_in("linear/skinny.cuh")
class LinearInputs(ctypes.Structure): ...


def fits_skinny(weights: Sequence[QuantTensor], x: DeviceArray) -> bool:
    """Whether `linear_skinny_cuda` is the best kernel for the float32 x [T, K], or its codes, times weights.

    The choice is the same on every device, as plans are made without one.
    """
    num_rows, cols = x.shape
    if num_rows > MAX_ROWS or len(weights) > MAX_MATRICES:
        return False
    if num_rows > MAX_TILE_ROWS and not all(map(_is_for_parts, weights)):
        return False
    has_floats = any(weight.quant_type in PASS_COLS for weight in weights)
    if not has_floats and all(is_large(weight.shape[0], cols, num_rows) for weight in weights):
        return False
    if has_floats and min(num_rows, MAX_TILE_ROWS) * cols > MAX_FLOAT_VALUES:
        return False
    if num_rows > MAX_LARGE_FLOAT_ROWS and are_large_floats(_sizes(weights)):
        return False
    return num_rows <= MAX_GEMV_ROWS or all(has_aligned_floats(weight, x) for weight in weights)


def divided(weights: Sequence[QuantTensor], x: DeviceArray) -> tuple[list[int], ...]:
    """The numbers of `weights` that `fits_skinny` is asked for together, all in one of the lists.

    Where a launch takes parts of x, tall matrices are apart, as GEMM has tiles enough for them.
    """
    numbers = list(range(len(weights)))
    if not MAX_TILE_ROWS < len(x) <= MAX_ROWS:
        return (numbers,)
    large = [i for i in numbers if _is_tall(weights[i])]
    return tuple(filter(None, (large, [i for i in numbers if i not in large])))


def _is_for_parts(weight: QuantTensor) -> bool:
    """Whether parts of more than MAX_TILE_ROWS rows are known to be faster than GEMM."""
    return weight.quant_type in PARTED_TYPES and not _is_tall(weight)


def _is_tall(weight: QuantTensor) -> bool:
    return weight.quant_type in INTEGER_TYPES and weight.shape[0] >= MIN_LARGE_SIDE


def needs_block_rows(weights: Sequence[QuantTensor], x: DeviceArray) -> bool:
    """Whether `linear_skinny_cuda` needs x quantised for blocks of 32; the same on every device."""
    has_blocks = any(weight.quant_type in BLOCK_TYPES for weight in weights)
    return has_blocks and Walk.of(_sizes(weights), len(x)) is Walk.PARTS


def has_aligned_floats(weight: QuantTensor, x: DeviceArray) -> bool:
    """Whether all rows of x and of a weight of floats begin on FLOAT_ROW_BYTES; true for one of integers."""
    if weight.quant_type not in PASS_COLS:
        return True
    row_bytes = weight.quant_type.row_bytes(weight.shape[1])
    return has_aligned_rows(x) and not (weight.blocks.data_ptr() | row_bytes) % FLOAT_ROW_BYTES


def _groups(weights: Sequence[QuantTensor]) -> int:
    """Groups of a row of codes; 0 if no weights need them."""
    has_codes = any(weight.quant_type in INTEGER_TYPES for weight in weights)
    return -(-weights[0].shape[1] // GROUP_SIZE) if has_codes else 0


def linear_skinny_cuda(
    weights: Sequence[QuantTensor],
    outs: Sequence[DeviceArray],
    *,
    activations: QuantActivations | None = None,
    x: DeviceArray | None = None,
    block_rows: QuantActivations | None = None,
    silu_divisor: int = 0,
) -> None:
    """Write x [T, K] times each of `weights` [N, K] into the `outs` float32 [T, N], in one launch.

    T ≤ MAX_ROWS. Weights in super-blocks of 256 need the quantised `activations` (laid out as
    `quantize/cuda.py` has it, with a scale for each 256 inputs), other types the float32 `x`, which the
    kernel quantises for smaller blocks; where `needs_block_rows`, they need `block_rows`, x so quantised. A
    weight's bytes are contiguous and aligned as its blocks are. Rows of x and outs may have any stride, but
    rows of x are aligned to 16 bytes for blocks of 32 or 64 and, like those of the weight, for floats with
    more than MAX_GEMV_ROWS. silu_divisor: where `shares_passes`, silu(y / divisor) of the first product is
    written in its place; 0 for the product. ValueError for shapes that do not fit.
    """
    num_rows = outs[0].shape[0]
    _check(weights, outs, activations, x, num_rows)
    limits, groups = device_limits(), _groups(weights)
    are_aligned = x is None or all(has_aligned_floats(weight, x) for weight in weights)
    layout = layout_for(limits, _sizes(weights), num_rows, are_aligned=are_aligned)
    has_blocks = any(weight.quant_type in BLOCK_TYPES for weight in weights)
    if layout.walk is Walk.PARTS and has_blocks and block_rows is None:
        raise ValueError("so many columns need rows quantised for blocks of 32")
    max_blocks = limits.num_processors * layout.plan.blocks_per_processor // layout.num_parts(num_rows)
    inputs = _inputs(activations, x, num_rows, groups, layout.part_rows)
    more: tuple[Argument, ...] = (float(silu_divisor),) if layout.walk is Walk.WIDE else ()
    if silu_divisor and not more:
        raise ValueError("no kernel for these weights applies an activation to a product")
    _launch(_matrices(weights, layout, outs, max_blocks), inputs, block_rows, layout, more)


def shares_passes(weights: Sequence[QuantTensor]) -> bool:
    """Whether one row's product with these weights is a launch in which warps of a block share the passes."""
    return layout_for(device_limits(), _sizes(weights), 1).walk is Walk.WIDE


def _sizes(weights: Sequence[QuantTensor]) -> list[Weight]:
    return [(weight.quant_type, weight.shape[0], weight.shape[1]) for weight in weights]


def _inputs(
    activations: QuantActivations | None, x: DeviceArray | None, num_rows: int, groups: int, part_rows: int
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
    layout: Layout,
    outs: Sequence[DeviceArray],
    max_blocks: int,
) -> LinearMatrices:
    """The kernel's table, with float matrices first, as their sums are the longest chains."""
    order = sorted(range(len(weights)), key=lambda i: weights[i].quant_type not in PASS_COLS)
    shapes, tiles = layout.shapes, [layout.tiles[i] for i in order]
    rest = [shapes[i] for i, count in zip(order, tiles, strict=True) if not count]
    shares = iter(share_blocks(rest, max_blocks - sum(tiles)))
    blocks = [count or next(shares) for count in tiles]
    table, first_block = LinearMatrices(count=len(weights)), 0
    for entry, i, num_blocks in zip(table.at, order, blocks, strict=False):
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


def _launch(
    table: LinearMatrices,
    inputs: LinearInputs,
    block_rows: QuantActivations | None,
    layout: Layout,
    more: Sequence[Argument],
) -> None:
    """more: arguments behind the layout's numbers."""
    last, types = table.at[table.count - 1], [shape.type for shape in layout.shapes]
    arguments: list[Argument] = [table, inputs]
    sets = layout.walk.sets(layout.slices) if layout.walk in SETS else 1
    if layout.walk is Walk.PARTS:
        kernel = PARTS_PROGRAM.kernel(instance_for(PARTS, types, layout.slices // sets, sets))
        rows = BlockRows()
        if block_rows is not None:
            rows = BlockRows(q=block_rows.q.data_ptr(), scales=block_rows.scales.data_ptr())
        arguments.append(rows)
    elif layout.walk is Walk.TILES:
        kernel = PROGRAM.kernel(instance_for(SKINNY, types, layout.slices // sets, sets))
    else:
        kernel = PROGRAM.kernel(instance_for(BY_WALK[layout.walk], types))
    kernel.launch(
        (last.first_block + last.num_blocks, layout.num_parts(inputs.num_rows), 1),
        layout.threads,
        (*arguments, *layout.numbers, *more),
        shared_bytes=layout.plan.shared_bytes,
        overlap=True,
    )


def _check(
    weights: Sequence[QuantTensor],
    outs: Sequence[DeviceArray],
    activations: QuantActivations | None,
    x: DeviceArray | None,
    num_rows: int,
) -> None:
    if not 0 < len(weights) == len(outs) <= MAX_MATRICES or not 0 < num_rows <= MAX_ROWS:
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
        if x is not None and num_rows > MAX_GEMV_ROWS and not has_aligned_floats(weight, x):
            raise ValueError(f"{weight.quant_type.name} weights and {num_rows} rows need rows on 16 bytes")
        if not weight.blocks.is_contiguous() or weight.blocks.data_ptr() % weight.quant_type.alignment:
            raise ValueError(f"{weight.quant_type.name} weights need adjacent bytes at an aligned address")


def has_aligned_rows(x: DeviceArray) -> bool:
    """Whether every row of float32 x starts on 16 bytes."""
    return x.data_ptr() % 16 == 0 and (len(x) == 1 or x.stride(0) % 4 == 0)
