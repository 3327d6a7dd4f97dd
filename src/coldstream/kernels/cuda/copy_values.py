"""Copies a matrix whose rows may be apart, as it is or to another type: `copy_values.cu`."""

from pathlib import Path
from typing import Final

from coldstream.kernels.cuda.array import ArrayError, DeviceArray, name_of
from coldstream.kernels.cuda.program import CudaProgram

WORDS: Final = "copy_values<uint32_t, uint32_t>"
# By the types of source and target.
INSTANCES: Final = {
    ("float32", "float32"): WORDS,
    ("int32", "int32"): WORDS,
    ("float32", "bfloat16"): "copy_values<uint16_t, float>",
    ("bfloat16", "float32"): "copy_values<float, uint16_t>",
}
PROGRAM = CudaProgram(Path(__file__).with_name("copy_values.cu"), tuple(dict.fromkeys(INSTANCES.values())))
THREADS = 256


def copy_values_cuda(source: DeviceArray, target: DeviceArray, first: DeviceArray | None = None) -> None:
    """Copies as many rows as `target` has into it, those of `source` from number `first` on.

    first: int32 [1] on the device, by default 0; the rows must exist. The matrices do not overlap.

    Columns are adjacent; rows may be apart, and all rows of the source the same (stride 0). Floats become
    bfloat16 by rounding to the nearest, ties to even. ArrayError for others.
    """
    rows, cols = target.shape
    types = name_of(source.dtype), name_of(target.dtype)
    is_adjacent = cols == 1 or source.stride(1) == target.stride(1) == 1
    is_like = source.shape[1] == cols and (len(source) == rows or (first is not None and len(source) > rows))
    if not is_like or not is_adjacent or types not in INSTANCES:
        raise ArrayError(
            f"{types[0]} {tuple(source.shape)} with strides {source.stride()} do not become {types[1]} "
            f"{(rows, cols)} with strides {target.stride()}"
        )
    grid = (-(-cols // THREADS), rows, 1)
    args = (source, source.stride(0), target, target.stride(0), cols, first)
    PROGRAM.kernel(INSTANCES[types]).launch(grid, THREADS, args, overlap=True)
