"""The tilings of `gemm_tiles.cuh` for launchers, and its arguments.

The kernel checks the size of its shared memory against its own count.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, SUM_SIZE, QuantActivations
from coldstream.kernels.cuda.array import ArrayError, check_array
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.linear.integer_types import (
    BLOCK_TYPES,
    INTEGER_TYPES,
    MINIMUM_TYPES,
    activation_scale_size,
)

CODE_PITCH = GROUP_SIZE + 16
SUM_PITCH = TABLE_PITCH = BLOCK_SCALE_PITCH = 48
MINIMUM_TABLE_PITCH = 80  # of blocks of 32 or 64 with minima
WINDOW = 16  # bytes
PITCH_UNIT = 32  # of rows of weights that are unpacked
HEADER_BYTES = 32  # of a stage, with its barriers
COPYING_WARPS = 4
# Bytes of the tables of `gemm_lookups.cuh`, and the types whose planes are halves of odd products.
LOOKUP_BYTES = {
    QuantType.IQ1_S: 8256,
    QuantType.IQ1_M: 8256,
    QuantType.IQ2_XXS: 24576,
    QuantType.IQ2_XS: 40960,
    QuantType.IQ2_S: 65568,
    QuantType.IQ3_XXS: 49152,
    QuantType.IQ3_S: 32832,
}
HALVED = frozenset({QuantType.IQ1_S, QuantType.IQ1_M, QuantType.IQ3_S})
IN_PLACE = frozenset(kind for kind in INTEGER_TYPES if kind.block_bytes % WINDOW == 0)
BLOCK_SIZE = 32
SWIZZLE_BYTES = 1024


@dataclass(frozen=True)
class Tiling:
    """Rows and tokens of a tile in products of 16 x 8, how warps share them, and groups in flight."""

    quant_type: QuantType
    row_products: int
    token_products: int
    warp_rows: int
    warp_columns: int
    stages: int
    blocks: int = 1  # on a multiprocessor
    by_warpgroups: bool = False

    @functools.cached_property
    def name(self) -> str:
        numbers = (self.row_products, self.token_products, self.warp_rows, self.warp_columns)
        arguments = ", ".join(map(str, (*numbers, self.stages, self.blocks)))
        flag = ", true" if self.by_warpgroups else ""
        return f"Tiling<{self.quant_type.name}, {arguments}{flag}>"

    @property
    def rows(self) -> int:
        return 16 * self.row_products * self.warp_rows

    @property
    def tokens(self) -> int:
        return 8 * self.token_products * self.warp_columns

    @property
    def threads(self) -> int:
        return 32 * (self.warp_rows * self.warp_columns + COPYING_WARPS)

    @functools.cached_property
    def shared_bytes(self) -> int:
        in_place, is_small = self.quant_type in IN_PLACE, self.quant_type in BLOCK_TYPES
        has_sums = self.quant_type in MINIMUM_TYPES and not is_small
        row_bytes = group_pitch(self.quant_type)
        sum_bytes = 0 if not has_sums else 2 * GROUP_SIZE // SUM_SIZE if self.by_warpgroups else SUM_PITCH
        scale_bytes = BLOCK_SCALE_PITCH if is_small else 4
        sums_end = HEADER_BYTES + (scale_bytes + sum_bytes) * self.tokens + 4 * (not in_place) * self.rows
        if self.by_warpgroups:
            sums_end += 4 * self.tokens * (self.quant_type in HALVED)
            codes_end = round_up(sums_end, SWIZZLE_BYTES) + GROUP_SIZE * self.tokens
            stage_bytes = round_up(codes_end + (row_bytes | WINDOW) * self.rows, SWIZZLE_BYTES)
        else:
            stage_bytes = sums_end + CODE_PITCH * self.tokens + row_bytes * self.rows
        table_pitch = MINIMUM_TABLE_PITCH if is_small and self.quant_type in MINIMUM_TYPES else TABLE_PITCH
        unpacked_bytes = 0 if in_place or self.by_warpgroups else CODE_PITCH + table_pitch
        waiting_bytes = 4 * self.shared_levels * self.tokens
        lookup_bytes = LOOKUP_BYTES.get(self.quant_type, 0) if self.by_warpgroups else 0
        return self.stages * stage_bytes + (unpacked_bytes + waiting_bytes) * self.rows + lookup_bytes

    @property
    def shared_levels(self) -> int:
        """Levels of the tree of sums that are kept in shared memory."""
        if self.quant_type.block_elements != GROUP_SIZE:
            return 0
        return 3 if self.quant_type in IN_PLACE else 2

    def grid(self, num_tiles: int) -> tuple[int, int, int]:
        """As many blocks as run on the device at a time, but at most one per tile."""
        return (min(num_tiles, device_limits().num_processors * self.blocks), 1, 1)


def group_pitch(quant_type: QuantType) -> int:
    """Bytes from row to row for a group of 256 weights, which may begin anywhere in a window."""
    group_bytes = quant_type.row_bytes(GROUP_SIZE)
    if quant_type in IN_PLACE:
        return group_bytes
    return round_up(group_bytes + WINDOW - quant_type.alignment, PITCH_UNIT)


def dense_tilings(quant_type: QuantType) -> tuple[Tiling, ...]:
    """Tilings for all rows of a matrix, in order of preference."""
    if quant_type in BLOCK_TYPES:
        return (Tiling(quant_type, 1, 2, 4, 2, 2),)
    numbers = (1, 4, 8, 2, 3) if quant_type in IN_PLACE else (1, 4, 4, 2, 2)
    return Tiling(quant_type, 1, 8, 8, 1, 3, by_warpgroups=True), Tiling(quant_type, *numbers)


def least_tiling(quant_type: QuantType) -> Tiling:
    """A tiling that fits every device (sm_86, sm_89 and sm_120 give a block 99 KiB)."""
    return Tiling(quant_type, 1, 2, 4, 2, stages=2)


def fitting(tilings: Sequence[Tiling]) -> Tiling:
    """The first of the tilings, of one type, that the current device can run, or `least_tiling`."""
    device = device_limits()
    for tiling in tilings:
        can_run = device.has_warpgroups or not tiling.by_warpgroups
        if can_run and tiling.shared_bytes <= device.shared_per_block:
            return tiling
    return least_tiling(tilings[0].quant_type)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@declared_in("cuda/gemm_copies.cuh", "Activations")
class ActivationsArgument(ctypes.Structure):
    @classmethod
    def of(cls, x: QuantActivations, quant_type: QuantType) -> "ActivationsArgument":
        """Contiguous rows of whole groups, the last padded with zero codes, for weights of a type.

        ValueError for others, and for scales that are not the type's.
        """
        num_rows, num_groups = len(x.q), x.q.shape[1] // GROUP_SIZE
        num_scales = num_groups * GROUP_SIZE // activation_scale_size(quant_type)
        for name, array, dtype, shape in (
            ("q", x.q, "int8", (num_rows, num_groups * GROUP_SIZE)),
            ("scales", x.scales, "float32", (num_rows, num_scales)),
            ("sums", x.sums, "int16", (num_rows, num_groups * GROUP_SIZE // SUM_SIZE)),
        ):
            check_array(name, array, dtype)
            if array.shape != shape:
                raise ArrayError(f"{name}: an array {tuple(array.shape)} where the kernel reads {shape}")
        return cls(
            q=x.q.data_ptr(), scales=x.scales.data_ptr(), sums=x.sums.data_ptr(), num_groups=num_groups
        )
