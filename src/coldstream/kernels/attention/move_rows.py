"""Moves keys and values of a committed path of a draft tree to their positions: `move_rows.cu`."""

import ctypes
from pathlib import Path

import torch

from coldstream.kernels.attention.arguments import CacheStrides
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.ops import CommittedPath

PROGRAM = CudaProgram(Path(__file__).with_name("move_rows.cu"), ("coldstream::move_rows",))
THREADS, PIECE_BYTES = 128, 16


class MovedPath(ctypes.Structure):
    """`moved_path` of move_rows.cu."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("count", "first", "sources", "table"))


def move_rows_cuda(k_cache: torch.Tensor, v_cache: torch.Tensor, path: CommittedPath) -> None:
    """`Ops.commit_attention`: one launch, whatever the path, over caches [blocks, 256, G, row] of any type.

    ValueError unless a position's bytes are contiguous, a multiple of 16, and keys and values laid out alike.
    """
    size = k_cache.itemsize
    block_bytes, position_bytes = k_cache.stride(0) * size, k_cache.stride(1) * size
    if v_cache.stride() != k_cache.stride() or v_cache.dtype != k_cache.dtype:
        raise ValueError("keys and values must be laid out alike")
    if not k_cache[0].is_contiguous() or position_bytes % PIECE_BYTES or block_bytes % PIECE_BYTES:
        raise ValueError(f"positions of {position_bytes} bytes cannot be moved in pieces of {PIECE_BYTES}")
    addresses = (path.count, path.first, path.sources, path.table)
    PROGRAM.kernel(PROGRAM.instances[0]).launch(
        (-(-position_bytes // (PIECE_BYTES * THREADS)), 2, 1),
        THREADS,
        (
            k_cache,
            v_cache,
            MovedPath(*(tensor.data_ptr() for tensor in addresses)),
            CacheStrides(block_bytes, position_bytes),
        ),
        overlap=True,
    )
