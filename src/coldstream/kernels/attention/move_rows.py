"""Moves keys and values of a committed path of a draft tree to their positions: `move_rows.cu`."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from coldstream.kernels.attention.arguments import CacheStrides
from coldstream.kernels.cuda.array import DeviceArray, element_bytes
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.ops import CommittedPath

PROGRAM = CudaProgram(Path(__file__).with_name("move_rows.cu"), ("coldstream::move_rows",))
THREADS, PIECE_BYTES = 128, 16
MOST_CACHES = 64  # of a launch, as in move_rows.cu


@declared_in("attention/move_rows.cu")
class MovedPath(ctypes.Structure): ...


@declared_in("attention/move_rows.cu")
class MovedCaches(ctypes.Structure): ...


def move_rows_cuda(caches: Sequence[tuple[DeviceArray, DeviceArray]], path: CommittedPath) -> None:
    """`Ops.commit_attention`: a launch for every 32 layers, whatever the path, over caches [blocks, 256, G,
    row] of any type.

    ValueError unless a position's bytes are contiguous, a multiple of 16, and all caches laid out alike.
    """
    every, one = [cache for pair in caches for cache in pair], caches[0][0]
    block_bytes, position_bytes = one.stride(0) * element_bytes(one), one.stride(1) * element_bytes(one)
    if any(cache.stride() != one.stride() or cache.dtype != one.dtype for cache in every):
        raise ValueError("keys and values of all layers must be laid out alike")
    if not one[0].is_contiguous() or position_bytes % PIECE_BYTES or block_bytes % PIECE_BYTES:
        raise ValueError(f"positions of {position_bytes} bytes cannot be moved in pieces of {PIECE_BYTES}")
    moved_path = MovedPath(
        count=path.count.data_ptr(),
        first=path.first.data_ptr(),
        sources=path.sources.data_ptr(),
        table=path.table.data_ptr(),
    )
    for first in range(0, len(every), MOST_CACHES):
        part = every[first : first + MOST_CACHES]
        moved = MovedCaches()
        moved.at[: len(part)] = [cache.data_ptr() for cache in part]
        PROGRAM.kernel(PROGRAM.instances[0]).launch(
            (-(-position_bytes // (PIECE_BYTES * THREADS)), len(part), 1),
            THREADS,
            (
                moved,
                moved_path,
                CacheStrides(block_bytes=block_bytes, position_bytes=position_bytes),
            ),
            overlap=True,
        )
