"""The tiles of `many_tiles.cuh`, as a launcher chooses them, and its arguments.

The kernel checks the shared memory that it is given against its own count.
"""

import ctypes
from dataclasses import dataclass

import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import GROUP_SIZE, SUM_SIZE, QuantActivations
from coldstream.kernels.cuda.limits import device_limits

CODE_PITCH = GROUP_SIZE + 16
SUM_PITCH = TABLE_PITCH = 48
WINDOW = 16  # bytes
HEADER_BYTES = 32  # of a stage, with its barriers
COPYING_WARPS = 4
IN_PLACE = frozenset({QuantType.Q4_K, QuantType.Q5_K})
BLOCK_SIZE = 32


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

    @property
    def name(self) -> str:
        numbers = (self.row_products, self.token_products, self.warp_rows, self.warp_columns)
        arguments = ", ".join(map(str, (*numbers, self.stages, self.blocks)))
        return f"tiling<{self.quant_type.name.lower()}, {arguments}>"

    @property
    def rows(self) -> int:
        return 16 * self.row_products * self.warp_rows

    @property
    def tokens(self) -> int:
        return 8 * self.token_products * self.warp_columns

    @property
    def threads(self) -> int:
        return 32 * (self.warp_rows * self.warp_columns + COPYING_WARPS)

    @property
    def shared_bytes(self) -> int:
        group_bytes = self.quant_type.row_bytes(GROUP_SIZE)
        if self.quant_type in IN_PLACE:
            row_bytes, token_bytes, unpacked_bytes = group_bytes, 4 + SUM_PITCH + CODE_PITCH, 0
        else:
            row_bytes = 4 + -(-(group_bytes + WINDOW - 2) // WINDOW) * WINDOW
            token_bytes, unpacked_bytes = 4 + CODE_PITCH, CODE_PITCH + TABLE_PITCH
        stage_bytes = HEADER_BYTES + row_bytes * self.rows + token_bytes * self.tokens
        waiting_bytes = 4 * self.shared_levels * self.rows * self.tokens
        return self.stages * stage_bytes + unpacked_bytes * self.rows + waiting_bytes

    @property
    def shared_levels(self) -> int:
        """Levels of the tree of sums that wait in shared memory."""
        if self.quant_type.block_elements != GROUP_SIZE:
            return 0
        return 3 if self.quant_type in IN_PLACE else 2

    def grid(self, num_tiles: int) -> tuple[int, int, int]:
        """As many blocks as the device holds at a time, or fewer if there are fewer tiles."""
        return (min(num_tiles, device_limits().num_processors * self.blocks), 1, 1)


def least_tiling(quant_type: QuantType) -> Tiling:
    """Small enough for every device (sm_86, sm_89 and sm_120 give a block 99 KiB)."""
    return Tiling(quant_type, 1, 2, 4, 2, stages=2)


def fitting(tiling: Tiling) -> Tiling:
    """`tiling`, or a smaller one if the current device has not the shared memory for it."""
    fits = tiling.shared_bytes <= device_limits().shared_per_block
    return tiling if fits else least_tiling(tiling.quant_type)


class Activations(ctypes.Structure):
    """`activations` of many_tiles.cuh."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("num_groups", ctypes.c_int32),
    )

    @classmethod
    def of(cls, x: QuantActivations) -> "Activations":
        """Contiguous rows of whole groups, the last padded with zero codes. ValueError otherwise."""
        num_rows, num_groups = x.scales.shape
        expected = {
            "q": (x.q, torch.int8, (num_rows, num_groups * GROUP_SIZE)),
            "scales": (x.scales, torch.float32, (num_rows, num_groups)),
            "sums": (x.sums, torch.int16, (num_rows, num_groups * GROUP_SIZE // SUM_SIZE)),
        }
        for name, (tensor, dtype, shape) in expected.items():
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {dtype} of shape {shape}, not {tuple(tensor.shape)}"
                )
        return cls(x.q.data_ptr(), x.scales.data_ptr(), x.sums.data_ptr(), num_groups)
