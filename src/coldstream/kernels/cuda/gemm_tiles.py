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
SUM_PITCH = TABLE_PITCH = 48
WINDOW = 16  # bytes
PITCH_UNIT = 32  # of rows of weights that are unpacked
HEADER_BYTES = 32  # of a stage, with its barriers
COPYING_WARPS = 4
# Bytes of the tables of `gemm_lookups.cuh`, and the types whose planes are halves of odd products.
LOOKUP_BYTES = {
    QuantType.IQ1_S: 8256,
    QuantType.IQ1_M: 8256,
    QuantType.IQ2_XXS: 24704,
    QuantType.IQ2_XS: 41088,
    QuantType.IQ2_S: 65696,
    QuantType.IQ3_XXS: 49408,
    QuantType.IQ3_S: 32832,
    QuantType.IQ4_XS: 32,
}
HALVED = frozenset({QuantType.IQ1_S, QuantType.IQ1_M, QuantType.IQ3_S})
IN_PLACE = frozenset(kind for kind in INTEGER_TYPES if kind.block_bytes % WINDOW == 0)
BLOCK_SIZE = 32
STAGE_BLOCKS = 8  # of 32 inputs, in a stage of blocks of 32 or 64
SHARERS, SHARED_BLOCKS = 4, 16  # warpgroups that share a tile's inputs, and blocks of 32 in a stage of it
TILE_BYTES = 32  # a barrier with what aligns it, and a header
SWIZZLE_BYTES = 1024
LEAST_SHARED_BYTES = 64 << 10  # that every device gives a block


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
        stage_bytes, unpacked_row_bytes = self._sums_end, 0
        if self.by_warpgroups:
            stage_bytes += 4 * self.tokens * (self.quant_type in HALVED)
            stage_bytes = round_up(stage_bytes, SWIZZLE_BYTES) + GROUP_SIZE * self.tokens
            stage_bytes = round_up(stage_bytes + (self._row_bytes | WINDOW) * self.rows, SWIZZLE_BYTES)
        else:
            stage_bytes += CODE_PITCH * self.tokens + self._row_bytes * self.rows
            if self.quant_type not in IN_PLACE | BLOCK_TYPES:
                unpacked_row_bytes = CODE_PITCH + TABLE_PITCH
        waiting_bytes = 4 * self.shared_levels * self.tokens
        lookup_bytes = LOOKUP_BYTES.get(self.quant_type, 0) if self.by_warpgroups else 0
        return self.stages * stage_bytes + (unpacked_row_bytes + waiting_bytes) * self.rows + lookup_bytes

    @property
    def _sums_end(self) -> int:
        """Bytes of a stage before the activations' codes."""
        has_sums = self.quant_type in MINIMUM_TYPES
        if self.quant_type in BLOCK_TYPES:
            scale_bytes, sum_bytes = 4 * STAGE_BLOCKS, 4 * STAGE_BLOCKS
        else:
            scale_bytes, sum_bytes = 4, 2 * GROUP_SIZE // SUM_SIZE if self.by_warpgroups else SUM_PITCH
        offset_bytes = 0 if self.quant_type in IN_PLACE else 4
        return HEADER_BYTES + (scale_bytes + has_sums * sum_bytes) * self.tokens + offset_bytes * self.rows

    @property
    def _row_bytes(self) -> int:
        """Bytes from row to row of the weights in a stage."""
        if self.quant_type in BLOCK_TYPES:
            return STAGE_BLOCKS * block_room(self.quant_type) | WINDOW
        return group_pitch(self.quant_type)

    @property
    def shared_levels(self) -> int:
        """Levels of the tree of sums that are kept in shared memory."""
        if self.quant_type in BLOCK_TYPES and self.token_products <= 2:
            return 0  # all accumulators are in registers
        return 3 if self.quant_type in IN_PLACE else 2

    def grid(self, num_tiles: int) -> tuple[int, int, int]:
        """As many blocks as run on the device at a time, but at most one per tile."""
        return (min(num_tiles, device_limits().num_processors * self.blocks), 1, 1)


class ShareTiling(Tiling):
    """Tiles of blocks of 32 or 64, whose inputs four warpgroups share; see `gemm_shares.cuh`."""

    @classmethod
    def of(cls, quant_type: QuantType) -> "ShareTiling":
        """The tiling of a type."""
        return cls(quant_type, 1, 8, 4, 1, stages=2, by_warpgroups=True)

    @functools.cached_property
    def name(self) -> str:
        return f"ShareTiling<{self.quant_type.name}, {self.stages}>"

    @property
    def threads(self) -> int:
        return 32 * (self.warp_rows * self.warp_columns * SHARERS + COPYING_WARPS)

    @functools.cached_property
    def shared_bytes(self) -> int:
        kind, stage_codes = self.quant_type, BLOCK_SIZE * SHARED_BLOCKS
        word_bytes = 4 * (self.tokens + 4) * SHARED_BLOCKS
        stage_bytes = HEADER_BYTES + (1 + (kind in MINIMUM_TYPES)) * word_bytes + 4 * self.rows
        row_bytes = round_up(kind.row_bytes(stage_codes) + WINDOW - kind.alignment, WINDOW) | WINDOW
        stage_bytes = round_up(stage_bytes, SWIZZLE_BYTES) + stage_codes * self.tokens + row_bytes * self.rows
        sums_bytes = 4 * SHARERS * self.rows * self.tokens
        tile_bytes = TILE_BYTES + 8 * self.rows + 4 * self.tokens
        return self.stages * round_up(stage_bytes, SWIZZLE_BYTES) + sums_bytes + tile_bytes


def group_pitch(quant_type: QuantType) -> int:
    """Bytes from row to row for super-blocks, which may begin anywhere in a window."""
    if quant_type in IN_PLACE:
        return quant_type.block_bytes
    return round_up(quant_type.block_bytes + WINDOW - quant_type.alignment, PITCH_UNIT)


def block_room(quant_type: QuantType) -> int:
    """Bytes of the windows that hold a block of 32 or 64 wherever it begins."""
    return round_up(quant_type.block_bytes + WINDOW - quant_type.alignment, WINDOW)


def dense_tilings(quant_type: QuantType) -> tuple[Tiling, ...]:
    """Tilings for all rows of a matrix, in order of preference."""
    if quant_type in BLOCK_TYPES:
        return ShareTiling.of(quant_type), Tiling(quant_type, 1, 4, 4, 2, 2)
    numbers = (1, 4, 8, 2, 3) if quant_type in IN_PLACE else (1, 4, 4, 2, 2)
    return Tiling(quant_type, 1, 8, 8, 1, 3, by_warpgroups=True), Tiling(quant_type, *numbers)


def least_tilings(quant_type: QuantType) -> tuple[Tiling, ...]:
    """Tilings of which one fits every device: the first from Ampere on, the last also before.

    sm_86, sm_89 and sm_120 give a block 99 KiB.
    """
    sizes = ((1, 2, 4, 2, 2), (1, 2, 4, 1, 2), (1, 2, 4, 2, 1))
    tilings = tuple(Tiling(quant_type, *numbers) for numbers in sizes)
    least = next(i for i, tiling in enumerate(tilings) if tiling.shared_bytes <= LEAST_SHARED_BYTES)
    return tilings[:1] if least == 0 else (tilings[0], tilings[least])


def fitting(tilings: Sequence[Tiling]) -> Tiling:
    """The first of the tilings, of one type, that the current device can run, or of `least_tilings`."""
    device = device_limits()
    least = least_tilings(tilings[0].quant_type)
    for tiling in (*tilings, *least):
        can_run = device.has_warpgroups or not tiling.by_warpgroups
        if can_run and tiling.shared_bytes <= device.shared_per_block:
            return tiling
    return least[-1]


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
