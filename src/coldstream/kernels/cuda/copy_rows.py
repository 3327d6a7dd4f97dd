"""Copies rows of activations, floats and codes in one launch: `copy_rows.cu`."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray, element_bytes
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in

PROGRAM = CudaProgram(Path(__file__).with_name("copy_rows.cu"), ("copy_rows",))
THREADS = 512
WORD_BYTES = 4


@declared_in("cuda/copy_rows.cu", "CopiedPart")
class _Part(ctypes.Structure): ...


@declared_in("cuda/copy_rows.cu", "CopiedParts")
class _Parts(ctypes.Structure): ...


def copy_rows_cuda(source: Activations, target: Activations, first: DeviceArray | None = None) -> None:
    """Copies as many rows as `target` has, those of `source` from number `first` on.

    first: int32 [1] on the device, by default 0; the rows must exist. ValueError if rows are not alike, or
    `source` has too few.
    """
    quantised = zip(vars(source.quantised).values(), vars(target.quantised).values(), strict=True)
    _copy([(source.values, target.values), *quantised], first)


def copy_float_rows_cuda(source: DeviceArray, target: DeviceArray, first: DeviceArray | None = None) -> None:
    """As `copy_rows_cuda`, of rows that have no codes."""
    _copy([(source, target)], first)


def _copy(pairs: Sequence[tuple[DeviceArray, DeviceArray]], first: DeviceArray | None) -> None:
    parts = _Parts()
    for place, (here, there) in enumerate(pairs):
        row_bytes = here.shape[1] * element_bytes(here)
        is_like = here.shape[1] == there.shape[1] and here.dtype == there.dtype and len(there) <= len(here)
        if not is_like or row_bytes % WORD_BYTES or not (here.is_contiguous() and there.is_contiguous()):
            raise ValueError(f"rows {tuple(there.shape)} of {there.dtype} from {tuple(here.shape)}")
        parts.at[place] = _Part(
            source=here.data_ptr(), target=there.data_ptr(), row_words=row_bytes // WORD_BYTES
        )
    grid = (len(pairs[0][1]), len(pairs), 1)
    PROGRAM.kernel("copy_rows").launch(grid, THREADS, (parts, first), overlap=True)
