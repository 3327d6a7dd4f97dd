"""How products with up to 64 rows are shared out: kernels, rows at a time, and a block's shared memory."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import GROUP_SIZE
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.skinny_shapes import (
    GROUP_TYPES,
    PART_ROW_BYTES,
    PASS_COLS,
    SLACK_BYTES,
    WARP_SIZE,
    MatrixShape,
    RingPlan,
    grid_bytes,
    lone_pass_cols,
    matrix_shape,
    part_shape,
    plan_ring,
    row_group_bytes,
    tile_shape,
)
from coldstream.kernels.linear.integer_types import BLOCK_TYPES

WARPS = 8  # of a block, or of each of its sets
BLOCKS_PER_PROCESSOR = 2  # where warps take units for themselves
SLICE_ROWS = 8  # of activations that meet the same unpacked weights
SLICES = (1, 2, 4, 8)  # that a block can take
MAX_TILE_ROWS = SLICE_ROWS * SLICES[-1]  # that a block can take
MAX_ROWS = 2 * MAX_TILE_ROWS  # of a launch, whose blocks take parts of them
# Limits as bench/kernels/gpu_skinny_variants.py measured them on Hopper, with shapes of 35B-A3B and 27B.
MAX_WARP_ROWS = 3  # up to which a warp multiplies one row after the other
MAX_RESIDENT_VALUES = 16 * 4096  # of all rows that a block holds at once
MAX_WHOLE_COLS = 8192
MIN_PARTED_WEIGHT_ROWS = 4096  # with fewer, units of a whole part are too few blocks
# Two sets of warps gain more by unpacking these than by parts of the columns.
LONG_PASS_COLS = 1024  # of one row in blocks of 32 that has no whole rows in a pass, so that a ring has two
MOST_STAGES = 4
QUICK_TYPES = frozenset({QuantType.Q4_K, QuantType.Q5_K})
# Beyond so many rows GEMM is faster with a matrix that has enough rows and columns for it.
MAX_LARGE_ROWS, MIN_LARGE_SIDE = 32, 4096
# Types that were timed with more rows than a block can take; others have GEMM for these.
PARTED_TYPES = QUICK_TYPES | {QuantType.Q6_K} | PASS_COLS.keys()
FLOAT_STAGE_VALUES = 128  # inputs of a stage
FLOAT_TILE_TOKENS = {1: 8, 2: 16, 4: 16, 8: 16}  # rows of activations, by slices
FLOAT_TILE_ROWS = {1: 32, 2: 4, 4: 16, 8: 16}  # rows of weights, by slices
FLOAT_BLOCKS = 2  # on a processor, of tiles of one slice, as in skinny.cu
# With fewer rows of weights in all matrices, the tiles of one slice are too few blocks.
MIN_TILED_FLOAT_ROWS = 2048
# Beyond so many rows, which are one slice, large matrices of floats alone are for GEMM. Here 16 rows of
# 8192 × 2048 in F32 take 85 µs on an H200, and GEMM takes 31 for 17. Less than 16 rows were not timed, nor
# smaller matrices, nor floats that share a launch with integers.
MAX_LARGE_FLOAT_ROWS = SLICE_ROWS
FLOAT_ROW_BYTES = 16  # to which rows of floats in tiles are aligned
TILE_BLOCKS = {
    1: 3,
    2: 3,
    4: 2,
    8: 1,
}  # on a processor, by slices of a set; where there is one set, as in skinny.cu
PART_BLOCKS = {1: 3, 2: 2, 4: 2, 8: 2}  # the same, as in parts.cu
GRID_ROOM = 32 << 10  # bytes for the copies of a grid, as in skinny.cuh
PARTIAL_BYTES = WARPS * WARP_SIZE * 16  # accumulators of a slice that warps exchange
ROW_BYTES = 16  # between quantised rows in shared memory
TERM_BYTES = 16  # of a lane's super-block, as in products_gemv.cuh


Weight = tuple[QuantType, int, int]  # rows and columns


class Walk(Enum):
    """Which kernel multiplies integer types, and how its blocks walk over weights and rows."""

    ONE = auto()  # one row; a warp takes units for itself
    WIDE = auto()  # one row, and a few long rows of weights; a block takes a unit, and its warps the passes
    ROWS = auto()  # a few, one after the other; the same
    FLOATS = auto()  # a few rows of large matrices of floats alone; a block takes a tile
    TILES = auto()  # tensor cores; a block takes a unit and holds whole rows
    PARTS = auto()  # the same, with a part of the columns of all rows at a time

    def sets(self, slices: int) -> int:
        """Sets of warps of a block, which share so many slices."""
        return SETS[self][slices]

    @classmethod
    def of(cls, weights: Sequence["Weight"], num_rows: int, *, are_aligned: bool = True) -> "Walk":
        """The walk for so many rows; the same on every device, as plans are made without one.

        are_aligned: whether rows of floats begin on FLOAT_ROW_BYTES.
        """
        if num_rows == 1:
            return cls.ONE
        kinds = {kind for kind, *_ in weights}
        if kinds.issubset(PASS_COLS):
            has_tiles = are_large_floats(weights) and are_aligned and num_rows <= SLICE_ROWS
            return cls.FLOATS if has_tiles else cls.TILES
        if num_rows <= SLICE_ROWS:
            return cls.ROWS if num_rows <= MAX_WARP_ROWS else cls.TILES
        return cls.PARTS if cls._has_parts(kinds, weights, num_rows) else cls.TILES

    @staticmethod
    def _has_parts(kinds: Set[QuantType], weights: Sequence["Weight"], num_rows: int) -> bool:
        cols, weight_rows = weights[0][2], sum(rows for _, rows, _ in weights)
        if cols > MAX_WHOLE_COLS or not kinds.isdisjoint(BLOCK_TYPES):
            return True
        if num_rows * cols <= MAX_RESIDENT_VALUES or weight_rows < MIN_PARTED_WEIGHT_ROWS:
            return False
        return num_rows <= 2 * SLICE_ROWS or not kinds <= QUICK_TYPES | PASS_COLS.keys()


# Sets of warps of a block, by slices. One set that takes parts is as fast with four slices.
SETS = {Walk.TILES: {1: 1, 2: 1, 4: 2, 8: 2}, Walk.PARTS: {1: 1, 2: 1, 4: 1, 8: 2}}


@dataclass(frozen=True)
class Layout:
    """How a launch is shared out.

    tiles: of each matrix of floats, each with a block; 0 for others, and where warps take rows of weights for
    themselves; of WIDE the units. part_rows: rows of activations that a block takes.
    numbers: the kernel's arguments behind its structures.
    """

    walk: Walk
    shapes: Sequence[MatrixShape]
    tiles: Sequence[int]
    part_rows: int
    plan: RingPlan
    numbers: tuple[int, ...]

    @property
    def slices(self) -> int:
        """Slices of `part_rows`, of the numbers that there are kernels for."""
        return slices_of(self.part_rows)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARPS * WARP_SIZE * (self.walk.sets(self.slices) if self.walk in SETS else 1)

    def num_parts(self, num_rows: int) -> int:
        """Parts of `num_rows`, each with blocks of its own."""
        return -(-num_rows // self.part_rows)


def slices_of(num_rows: int) -> int:
    """The fewest slices that a kernel takes at once and that hold so many rows."""
    return next(slices for slices in SLICES if num_rows <= slices * SLICE_ROWS)


def is_large(weight_rows: int, cols: int, num_rows: int) -> bool:
    """Whether GEMM is faster with a matrix of an integer type."""
    return num_rows > MAX_LARGE_ROWS and min(weight_rows, cols) >= MIN_LARGE_SIDE


def are_large_floats(weights: Sequence[Weight]) -> bool:
    """Whether all are matrices of floats, and the largest has enough rows for tiles on a whole device."""
    largest = max(rows for _, rows, _ in weights)
    return largest >= MIN_TILED_FLOAT_ROWS and all(kind in PASS_COLS for kind, *_ in weights)


def tile_blocks(slices: int, walk: Walk) -> int:
    """The most blocks on a processor, which limit the registers of a thread, as in skinny.cu and parts.cu."""
    return 1 if walk.sets(slices) > 1 else (PART_BLOCKS if walk is Walk.PARTS else TILE_BLOCKS)[slices]


def _float_tiles(shape: MatrixShape, part_rows: int, walk: Walk) -> int:
    """See `Layout.tiles`."""
    slices = slices_of(part_rows)
    if shape.type not in PASS_COLS or walk is Walk.ONE or (slices == 1 and walk is not Walk.FLOATS):
        return 0
    return -(-int(shape.num_rows) // FLOAT_TILE_ROWS[slices]) * -(-part_rows // FLOAT_TILE_TOKENS[slices])


def float_stages(kind: QuantType, slices: int) -> int:
    """Stages of a tile of floats."""
    return 6 if slices == 2 or (slices == 1 and kind is not QuantType.F32) else 4


def float_tile_bytes(types: Sequence[QuantType], slices: int) -> int:
    """Shared memory for a tile of floats in a launch with weights of `types`."""
    x_bytes = FLOAT_TILE_TOKENS[slices] * (4 * FLOAT_STAGE_VALUES + FLOAT_ROW_BYTES)

    def tile_bytes(kind: QuantType) -> int:
        row_bytes = kind.row_bytes(FLOAT_STAGE_VALUES) + FLOAT_ROW_BYTES
        return float_stages(kind, slices) * (x_bytes + FLOAT_TILE_ROWS[slices] * row_bytes)

    return max((tile_bytes(kind) for kind in types if kind in PASS_COLS), default=0)


def layout_for(
    limits: DeviceLimits, weights: Sequence[Weight], num_rows: int, *, are_aligned: bool = True
) -> Layout:
    """For all rows in one part, if they fit into shared memory together, otherwise for more parts.

    are_aligned: whether rows of floats begin on FLOAT_ROW_BYTES. ValueError if a single row does not fit.
    """
    walk = Walk.of(weights, num_rows, are_aligned=are_aligned)
    part_rows = num_rows
    if num_rows > MAX_TILE_ROWS:
        num_parts = -(-num_rows // MAX_TILE_ROWS)
        part_rows = -(-num_rows // (num_parts * SLICE_ROWS)) * SLICE_ROWS
    while part_rows > 0:
        layout = _layout(limits, weights, part_rows, walk)
        if layout is not None:
            return layout
        if walk in (Walk.ONE, Walk.ROWS, Walk.FLOATS):
            walk = Walk.TILES
        else:
            part_rows = part_rows // 2 if part_rows <= SLICE_ROWS else slices_of(part_rows) // 2 * SLICE_ROWS
    raise ValueError(f"a row of {weights[0][2]} activations does not fit a block's shared memory")


def _layout(limits: DeviceLimits, weights: Sequence[Weight], part_rows: int, walk: Walk) -> Layout | None:
    types = [kind for kind, *_ in weights]
    by_walk = {Walk.ONE: _lone_shape, Walk.TILES: tile_shape, Walk.PARTS: part_shape}
    shapes = [(matrix_shape if w[0] in PASS_COLS else by_walk.get(walk, matrix_shape))(*w) for w in weights]
    tiles = [_float_tiles(shape, part_rows, walk) for shape in shapes]
    slices = slices_of(part_rows)
    if walk is Walk.FLOATS:
        plan = plan_ring(limits, 0, float_tile_bytes(types, slices), FLOAT_BLOCKS)
        return None if plan is None else Layout(walk, shapes, tiles, part_rows, plan, ())
    stage_bytes = _most_stage_bytes(shapes, types, floats=False)
    value_bytes = _most_stage_bytes(shapes, types, floats=True)
    # One block if it has a warp for every unit: the next kernel then fits beside it and loads its first
    # weights early.
    by_warps = walk in (Walk.ONE, Walk.ROWS)
    units = sum(count or shape.num_units for count, shape in zip(tiles, shapes, strict=True))
    is_small = units <= limits.num_processors * (WARPS if by_warps else 1)
    most = 1 if is_small else BLOCKS_PER_PROCESSOR if by_warps else tile_blocks(slices, walk)
    group_bytes = row_group_bytes(types, at_once=False, is_lone=walk is Walk.ONE)
    row_bytes = -(-weights[0][2] // GROUP_SIZE) * group_bytes
    if walk is Walk.ONE:
        if is_wide(limits, types, shapes):
            wide = _wide_layout(limits, types, shapes, row_bytes)
            if wide is not None:
                return wide
        stage_bytes = max(stage_bytes, value_bytes)
        others = grid_bytes(types, GRID_ROOM) + row_bytes + SLACK_BYTES
        # A warp with one unit of blocks of 32 has all its passes under way before the launch in front ends.
        are_blocks = is_small and BLOCK_TYPES.issuperset(types)
        stages = max(2, min(MOST_STAGES, int(shapes[0].num_passes))) if are_blocks else 2
        plan = plan_ring(limits, WARPS * stage_bytes, others, most, most_stages=stages)
        if plan is None:
            return None
        return Layout(walk, shapes, tiles, part_rows, plan, (stage_bytes, plan.stages))
    if walk is Walk.ROWS:
        return _rows_layout(limits, shapes, part_rows, (stage_bytes, value_bytes), row_bytes, most)
    others = slices * PARTIAL_BYTES + SLACK_BYTES
    rows_at = stage_bytes
    if walk is Walk.PARTS:
        stage_bytes += part_rows * PART_ROW_BYTES
    else:
        others += part_rows * (row_bytes + ROW_BYTES)
    own_values = WARPS * value_bytes if slices == 1 else 0
    least = float_tile_bytes(types, slices) if slices > 1 else 0
    plan = plan_ring(limits, max(stage_bytes, own_values), others, most, least_bytes=least)
    sizes = (stage_bytes, rows_at, value_bytes) if walk is Walk.PARTS else (stage_bytes, value_bytes)
    return None if plan is None else Layout(walk, shapes, tiles, part_rows, plan, (*sizes, plan.stages))


def is_wide(limits: DeviceLimits, types: Sequence[QuantType], shapes: Sequence[MatrixShape]) -> bool:
    """Whether one row meets weights of super-blocks that would be one warp of work for a processor."""
    if not GROUP_TYPES.issuperset(types) or sum(shape.num_units for shape in shapes) > limits.num_processors:
        return False
    return 1 < int(shapes[0].num_passes) <= WARPS


def _wide_layout(
    limits: DeviceLimits, types: Sequence[QuantType], shapes: Sequence[MatrixShape], row_bytes: int
) -> Layout | None:
    stage_bytes = _most_stage_bytes(shapes, types, floats=False)
    terms_at = _aligned(grid_bytes(types, GRID_ROOM) + WARPS * stage_bytes + row_bytes + SLACK_BYTES)
    plan = plan_ring(limits, 0, terms_at + WARPS * WARP_SIZE * TERM_BYTES, 1)
    units = [shape.num_units for shape in shapes]
    return None if plan is None else Layout(Walk.WIDE, shapes, units, 1, plan, (stage_bytes, terms_at))


def _lone_shape(quant_type: QuantType, rows: int, cols: int) -> MatrixShape:
    pass_cols = lone_pass_cols(quant_type, cols, otherwise=LONG_PASS_COLS)
    return matrix_shape(quant_type, rows, cols, pass_cols=pass_cols)


def _rows_layout(
    limits: DeviceLimits,
    shapes: Sequence[MatrixShape],
    num_rows: int,
    stage_bytes: tuple[int, int],
    row_bytes: int,
    most_blocks: int,
) -> Layout | None:
    """stage_bytes: of integer types and of floats."""
    has_passes = any(shape.num_passes > 1 for shape in shapes if shape.type not in PASS_COLS)
    row_memory = _aligned(num_rows * row_bytes + SLACK_BYTES)
    accumulators = WARPS * num_rows * WARP_SIZE * 4 * has_passes
    sums = num_rows * max(int(shape.unit_rows) for shape in shapes) * 4
    others = row_memory + accumulators + WARPS * sums
    plan = plan_ring(limits, WARPS * max(stage_bytes), others, most_blocks)
    if plan is None:
        return None
    accumulators_at = plan.stages * WARPS * stage_bytes[0] + row_memory
    places = accumulators_at, accumulators_at + accumulators, sums
    no_tiles = [0] * len(shapes)
    return Layout(Walk.ROWS, shapes, no_tiles, num_rows, plan, (*stage_bytes, plan.stages, *places))


def _most_stage_bytes(shapes: Sequence[MatrixShape], types: Sequence[QuantType], *, floats: bool) -> int:
    pairs = zip(shapes, types, strict=True)
    return max((shape.stage_bytes for shape, kind in pairs if (kind in PASS_COLS) == floats), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
