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


def move_rows_cuda(caches: Sequence[tuple[DeviceArray, ...]], path: CommittedPath) -> None:
    """`Ops.commit_attention`: a launch for every 32 layers that are laid out alike, whatever the path.

    Over caches [blocks, 256, G, row] of any type. ValueError unless a position's bytes are contiguous, and a
    multiple of 16.
    """
    moved_path = MovedPath(
        count=path.count.data_ptr(),
        first=path.first.data_ptr(),
        sources=path.sources.data_ptr(),
        table=path.table.data_ptr(),
    )
    alike: dict[tuple[int, int], list[DeviceArray]] = {}
    for of_layer in caches:
        for cache in of_layer:
            alike.setdefault(_strides_of(cache), []).append(cache)
    for strides, every in alike.items():
        for first in range(0, len(every), MOST_CACHES):
            _move(every[first : first + MOST_CACHES], *strides, moved_path)


def _strides_of(cache: DeviceArray) -> tuple[int, int]:
    """Bytes of a block and of a position."""
    block_bytes, position_bytes = (cache.stride(axis) * element_bytes(cache) for axis in (0, 1))
    if not cache[0].is_contiguous() or position_bytes % PIECE_BYTES or block_bytes % PIECE_BYTES:
        raise ValueError(f"positions of {position_bytes} bytes cannot be moved in pieces of {PIECE_BYTES}")
    return block_bytes, position_bytes


def _move(caches: Sequence[DeviceArray], block_bytes: int, position_bytes: int, path: MovedPath) -> None:
    """At most MOST_CACHES that are laid out alike."""
    moved = MovedCaches()
    moved.at[: len(caches)] = [cache.data_ptr() for cache in caches]
    PROGRAM.kernel(PROGRAM.instances[0]).launch(
        (-(-position_bytes // (PIECE_BYTES * THREADS)), len(caches), 1),
        THREADS,
        (moved, path, CacheStrides(block_bytes=block_bytes, position_bytes=position_bytes)),
        overlap=True,
    )
