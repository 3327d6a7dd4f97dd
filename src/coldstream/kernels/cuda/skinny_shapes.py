"""How GEMV and skinny kernels walk a weight matrix, and their shared memory.

The numbers of `weight_ring.cuh` and its products that do not affect results: columns of a pass, weight rows
of a unit, and their layout in the ring.
"""

import ctypes
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.linear.integer_types import BLOCK_TYPES, INTEGER_TYPES

MAX_GEMV_ROWS = 8  # up to which a warp takes all rows of activations, and a launch has the whole router
MAX_PAIR_ROWS = 64  # in one launch of experts, where every pair of a row and an expert has its own blocks
WARP_SIZE = 32
COPY_BYTES = 16
QUAD_ROWS = 4  # weight rows that a group of four lanes works on
TILE_ROWS = 16  # weight rows of a product of the tensor cores
BANK_BYTES = 128  # one word of each bank of shared memory
# Bytes from a row in a warp's ring to the next, modulo BANK_BYTES. Lanes read words of four rows at once, and
# with these fewest of them meet in a bank. The first is for all types but those of the table.
ROW_SHIFT = 32
ROW_SHIFTS = {QuantType.Q4_K: 0, QuantType.Q5_K: 0, QuantType.Q6_K: 48, QuantType.IQ4_XS: 64}
NUM_GROUPS = 8  # of four lanes in a warp
PASS_COLS = {QuantType.F32: 1024, QuantType.F16: 2048, QuantType.BF16: 2048}  # 4 KiB of the one row
INTEGER_PASS_COLS = NUM_GROUPS * GROUP_SIZE
MAX_WHOLE_BYTES = 16 << 10  # of a unit whose rows a pass has as a whole
MAX_IN_A_BANK = 2
PART_COLS, PART_UNIT_ROWS = 4 * GROUP_SIZE, 2 * TILE_ROWS
PART_ROW_BYTES = PART_COLS + 16 + PART_COLS // GROUP_SIZE * (32 + 4)  # codes, sums or scales of 32, scales
SKINNY_TYPES = INTEGER_TYPES | set(PASS_COLS)
GROUP_TYPES = INTEGER_TYPES - BLOCK_TYPES
GROUP_BYTES = GROUP_SIZE + 16 + 4  # codes, sums of 32 and scale of a group of activations in shared memory
BLOCK_GROUP_BYTES = GROUP_SIZE + GROUP_SIZE // BLOCK_SIZE * 4  # for weights in small blocks: codes, scales
# The same of an only row for these types: codes, once more by columns, scales and sums.
COLUMN_GROUP_BYTES = 2 * GROUP_SIZE + GROUP_SIZE // BLOCK_SIZE * 8
COLUMN_TYPES = frozenset({QuantType.Q5_1})
# Words of the grids that a block with one row of activations keeps in shared memory, as in weight_traits.cuh.
GRID_ENTRIES = {
    QuantType.IQ2_XXS: 256,
    QuantType.IQ2_XS: 512,
    QuantType.IQ2_S: 1024,
    QuantType.IQ3_XXS: 256,
    QuantType.IQ3_S: 512,
    QuantType.IQ1_S: 2048,
    QuantType.IQ1_M: 2048,
}
REPEATED_GRIDS = {QuantType.IQ3_XXS, QuantType.IQ3_S}
GRID_COPIES = (16, 8)  # of which the first that fits is taken
SLACK_BYTES = 4  # after the scales, which the compiler loads in pairs, of which the last may be half
STATIC_BYTES = 1024  # most shared memory that a kernel declares statically


def instance_for(kernel: str, types: Iterable[int], *numbers: int) -> str:
    """The instance of a kernel with `numbers` that reads weights of these types, given by their numbers."""
    mask = sum(1 << number for number in {int(each) for each in types})
    return f"{kernel}<{', '.join([f'{mask}u', *map(str, numbers)])}>"


def row_group_bytes(types: Iterable[int], *, at_once: bool, is_lone: bool) -> int:
    """Shared memory for a group of a row of activations for weights of these types.

    at_once: for all of the types together, otherwise for one of them. is_lone: it is a block's only row.
    """
    numbers = {int(each) for each in types}
    block_bytes = lone_group_bytes(numbers) if is_lone else BLOCK_GROUP_BYTES
    forms = ((GROUP_BYTES, GROUP_TYPES), (block_bytes, BLOCK_TYPES))
    needed = [size for size, readers in forms if any(int(each) in numbers for each in readers)]
    return sum(needed) if at_once else max(needed, default=0)


def lone_group_bytes(types: Iterable[int]) -> int:
    """The form for blocks of 32 of a block's only row."""
    numbers = {int(each) for each in types}
    has_columns = any(int(each) in numbers for each in COLUMN_TYPES)
    return COLUMN_GROUP_BYTES if has_columns else BLOCK_GROUP_BYTES


def grid_bytes(types: Iterable[int], room: int) -> int:
    """Shared memory for the grids of all of these types, in a kernel with `room` bytes for copies of one."""
    numbers = {int(each) for each in types}
    words = {kind: size for kind, size in GRID_ENTRIES.items() if int(kind) in numbers}
    for kind in REPEATED_GRIDS & words.keys():
        words[kind] *= next((copies for copies in GRID_COPIES if 4 * copies * words[kind] <= room), 1)
    return 4 * sum(words.values())


@declared_in("cuda/weight_ring.cuh")
class MatrixShape(ctypes.Structure):
    @property
    def num_units(self) -> int:
        """Units of work for the warps."""
        return -(-int(self.num_rows) // int(self.unit_rows))

    @property
    def stage_bytes(self) -> int:
        """Shared memory for one pass of a unit, which may begin anywhere in a chunk."""
        return _chunk_bytes(self.unit_rows * self.stage_stride) + COPY_BYTES


def matrix_shape(
    quant_type: QuantType,
    rows: int,
    cols: int,
    spread: int | None = None,
    pass_cols: int = INTEGER_PASS_COLS,
) -> MatrixShape:
    """The walk of a warp over a matrix [rows, cols]; `spread` is the log2 of the quads it takes at once.

    pass_cols: for an integer type, see `lone_pass_cols`.
    """
    spread = natural_spread(quant_type, cols) if spread is None else spread
    unit_rows = 1 if quant_type in PASS_COLS else QUAD_ROWS << spread
    is_whole = pass_cols == cols > INTEGER_PASS_COLS
    shape = _shape(quant_type, rows, cols, unit_rows, spread, pass_cols)
    shift = ROW_SHIFTS.get(quant_type, ROW_SHIFT)
    is_spread = spread > 0 or shape.row_bytes % BANK_BYTES == shift or quant_type in PASS_COLS or is_whole
    shape.stage_stride = shape.row_bytes
    if shape.num_passes > 1 or not is_spread:
        # Rows that are copied one by one may each begin anywhere in a chunk.
        least = _chunk_bytes(shape.pass_bytes) + COPY_BYTES
        shape.stage_stride = least + (0 if quant_type in PASS_COLS else (shift - least) % BANK_BYTES)
    return shape


def lone_pass_cols(quant_type: QuantType, cols: int, otherwise: int = INTEGER_PASS_COLS) -> int:
    """Columns of a pass for one row of activations.

    Blocks of 32 have whole rows, which lie in a warp's ring as in the matrix, where rows are longer than a
    pass, not too long for a ring, and begin in different banks. `otherwise`: of longer rows.
    """
    if quant_type not in BLOCK_TYPES or cols <= INTEGER_PASS_COLS:
        return INTEGER_PASS_COLS
    row_bytes = quant_type.row_bytes(cols)
    fits = QUAD_ROWS * row_bytes <= MAX_WHOLE_BYTES
    return cols if fits and most_in_a_bank(quant_type, row_bytes) <= MAX_IN_A_BANK else otherwise


def most_in_a_bank(quant_type: QuantType, row_bytes: int) -> int:
    """Words that lanes with adjacent rows and blocks read of a bank at once, at most, in any word of a block.

    Lanes read 32 codes each: eight of a row, one behind the other, and the same of the next three rows.
    """
    parts = quant_type.block_elements // BLOCK_SIZE
    most = 0
    for at in range(0, quant_type.block_bytes, 4):
        words = {
            (row * row_bytes + block // parts * quant_type.block_bytes + block % parts * 8 + at) // 4
            for row in range(QUAD_ROWS)
            for block in range(NUM_GROUPS)
        }
        most = max(most, *Counter(word % (BANK_BYTES // 4) for word in words).values())
    return most


def tile_shape(quant_type: QuantType, rows: int, cols: int) -> MatrixShape:
    """The walk of a block over a matrix [rows, cols] of an integer type, for several rows of activations."""
    spread = natural_spread(quant_type, cols)
    return _with_tile_stride(_shape(quant_type, rows, cols, TILE_ROWS << spread, spread), quant_type)


def part_shape(quant_type: QuantType, rows: int, cols: int) -> MatrixShape:
    """As `tile_shape`, where a stage has as many columns of the activations; see products_parts.cuh."""
    return _with_tile_stride(_shape(quant_type, rows, cols, PART_UNIT_ROWS, 1, PART_COLS), quant_type)


def _with_tile_stride(shape: MatrixShape, quant_type: QuantType) -> MatrixShape:
    """Rows that a warp reads at the same time begin in different banks."""
    is_aligned = quant_type.block_bytes % COPY_BYTES == 0
    least = _chunk_bytes(shape.pass_bytes) + (0 if is_aligned else COPY_BYTES)
    shape.stage_stride = -(-(least - COPY_BYTES) // BANK_BYTES) * BANK_BYTES + COPY_BYTES
    return shape


def _shape(
    quant_type: QuantType,
    rows: int,
    cols: int,
    unit_rows: int,
    spread: int,
    pass_cols: int = INTEGER_PASS_COLS,
) -> MatrixShape:
    """All but the stride of the ring's rows."""
    row_bytes = quant_type.row_bytes(cols)
    pass_cols = PASS_COLS.get(quant_type, pass_cols)
    return MatrixShape(
        type=int(quant_type),
        num_rows=rows,
        num_cols=cols,
        row_bytes=row_bytes,
        pass_bytes=min(quant_type.row_bytes(pass_cols), row_bytes),
        num_passes=-(-cols // pass_cols),
        unit_rows=unit_rows,
        spread=spread,
    )


def _chunk_bytes(num_bytes: int) -> int:
    return -(-num_bytes // COPY_BYTES) * COPY_BYTES


def natural_spread(quant_type: QuantType, cols: int) -> int:
    """How often the quads of a warp can be doubled before a row's super-blocks have no lanes left."""
    if quant_type.block_elements != GROUP_SIZE:
        return 0
    return max(0, 3 - (cols // GROUP_SIZE - 1).bit_length())


@dataclass(frozen=True)
class RingPlan:
    """Shared memory of a block: its rings with so many `stages` each, then the activations; in bytes."""

    stages: int
    shared_bytes: int
    blocks_per_processor: int


def plan_ring(
    limits: DeviceLimits,
    stage_bytes: int,
    other_bytes: int,
    max_blocks: int,
    *,
    least_bytes: int = 0,
    most_stages: int = 2,
) -> RingPlan | None:
    """The most stages with which `max_blocks` such blocks fit a processor, or the number for more blocks.

    stage_bytes: one stage of all rings of the block; other_bytes: everything else; least_bytes: of a block in
    any case; most_stages: 2, or more where warps have so many passes. None if no block fits.
    """
    plans = [
        _plan_stages(limits, stages, max(stages * stage_bytes + other_bytes, least_bytes), max_blocks)
        for stages in range(most_stages, 0, -1)
    ]
    return max(
        (plan for plan in plans if plan is not None),
        key=lambda plan: (plan.blocks_per_processor, plan.stages),
        default=None,
    )


def _plan_stages(limits: DeviceLimits, stages: int, shared_bytes: int, max_blocks: int) -> RingPlan | None:
    if shared_bytes + STATIC_BYTES > limits.shared_per_block:
        return None
    fitting = limits.shared_per_processor // (shared_bytes + STATIC_BYTES + limits.reserved_per_block)
    return RingPlan(stages, shared_bytes, min(max_blocks, fitting))
