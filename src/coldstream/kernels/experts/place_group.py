"""Writes the addresses of a group of adjacent experts into tables: one launch, no copy."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.shapes import MATRICES, MAX_GROUP

PROGRAM = CudaProgram(Path(__file__).with_name("place_group.cu"), ("place_group",))
THREADS = 256


@declared_in("experts/place_group.cu")
class _Group(ctypes.Structure): ...


@declared_in("experts/place_group.cu")
class _Tables(ctypes.Structure): ...


def place_group_cuda(
    experts: Sequence[int],
    first: Sequence[int],
    sizes: Sequence[int],
    tables: Sequence[DeviceArray],
    *,
    clears: bool,
) -> None:
    """Writes the address first[m] + i · sizes[m] for matrix m of experts[i]; `clears`: and 0 for all others.

    tables: int64 [num_experts] on the device for gate, up and down. ValueError for too many experts.
    """
    if len(experts) > MAX_GROUP:
        raise ValueError(f"{len(experts)} experts in a group, but at most {MAX_GROUP}")
    group = _Group(
        first=(ctypes.c_int64 * MATRICES)(*first),
        size=(ctypes.c_int64 * MATRICES)(*sizes),
        count=len(experts),
        numbers=(ctypes.c_uint16 * MAX_GROUP)(*experts),
    )
    to = _Tables((ctypes.c_void_p * MATRICES)(*(table.data_ptr() for table in tables)))
    PROGRAM.kernel("place_group").launch((1, 1, 1), THREADS, (group, to, len(tables[0]), int(clears)))
