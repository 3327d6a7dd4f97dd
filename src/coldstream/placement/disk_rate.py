"""Measures how fast a file's disk is read past the page cache."""

import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

_PAGE_BYTES: Final = 4096  # alignment of direct reads
_NUM_THREADS: Final = 8  # enough requests at once for an NVMe disk
_NUM_PASSES: Final = 3
_PASS_LIMIT_S: Final = 0.2


def measure_disk(path: Path, piece_bytes: int) -> float | None:
    """Bytes per second of reading pieces of a file in random order, past the page cache.

    piece_bytes: of one read, rounded up to whole pages. The best of three measurements, half a second in all.
    None without direct reads on this platform or file system, or for a file below one piece.
    """
    piece_bytes = -(-piece_bytes // _PAGE_BYTES) * _PAGE_BYTES
    flag = getattr(os, "O_DIRECT", None)
    num_pieces = path.stat().st_size // piece_bytes
    if flag is None or num_pieces == 0:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | flag)
    except OSError:
        return None
    try:
        return max(_pass_rate(descriptor, num_pieces, piece_bytes) for _ in range(_NUM_PASSES))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _pass_rate(descriptor: int, num_pieces: int, piece_bytes: int) -> float:
    order = iter(np.random.default_rng(0).permutation(num_pieces).tolist())
    start = time.perf_counter()
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        readers = [
            threads.submit(_read_pieces, descriptor, order, piece_bytes, start + _PASS_LIMIT_S)
            for _ in range(min(_NUM_THREADS, num_pieces))
        ]
        num_bytes = sum(reader.result() for reader in readers)
    return num_bytes / (time.perf_counter() - start)


def _read_pieces(descriptor: int, order: Iterator[int], piece_bytes: int, until: float) -> int:
    """Bytes read; all readers take from one `order`."""
    num_bytes = 0
    with mmap.mmap(-1, piece_bytes) as buffer:  # page-aligned, as direct reads need
        for piece in order:
            num_bytes += os.preadv(descriptor, [buffer], piece * piece_bytes)
            if time.perf_counter() > until:
                break
    return num_bytes
