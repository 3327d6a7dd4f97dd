"""GEMM on integer tensor cores."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.gemm_tiles import (
    BLOCK_SIZE,
    ActivationsArgument,
    Tiling,
    dense_tilings,
    fitting,
    least_tilings,
)
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.quant_tensor import QuantTensor

TILINGS: Mapping[QuantType, tuple[Tiling, ...]] = {
    kind: dense_tilings(kind) for kind in sorted(INTEGER_TYPES)
}


@declared_in("linear/gemm.cu")
class LinearJob(ctypes.Structure): ...


def instance(tiling: Tiling) -> str:
    return f"linear_gemm<{tiling.name}>"


PROGRAM = CudaProgram(
    Path(__file__).with_name("gemm.cu"),
    tuple(
        instance(t)
        for tilings in TILINGS.values()
        for t in dict.fromkeys((*tilings, *least_tilings(tilings[0].quant_type)))
    ),
    is_slow=True,
)


def linear_gemm(x: QuantActivations, weight: QuantTensor, out: DeviceArray) -> None:
    """Write x [T, K] times weight [N, K] to `out`, every bit as docs/arithmetic.md has it.

    x is padded to whole groups of 256 and has the scales that the type reads (`activation_scale_size`);
    `weight` is of a quantised type with adjacent rows; out is float32 [T, N] with unit stride along the last
    dimension. Any T; efficient from 9 rows on. One launch. Raises ValueError if
    shapes disagree, KeyError for a type.
    """
    launch_linear(PROGRAM, fitting(TILINGS[weight.quant_type]), x, weight, out)


def launch_linear(
    program: CudaProgram,
    tiling: Tiling,
    x: QuantActivations,
    weight: QuantTensor,
    out: DeviceArray,
) -> None:
    """`linear_gemm` with a given tiling."""
    num_rows, num_values = weight.shape
    num_tokens, num_groups = len(x.q), x.q.shape[1] // GROUP_SIZE
    if num_groups != -(-num_values // GROUP_SIZE) or tuple(out.shape) != (num_tokens, num_rows):
        raise ValueError(
            f"activations of {num_groups} groups and an output {tuple(out.shape)} do not fit {weight.shape}"
        )
    check_array("out", out, "float32", is_contiguous=False)
    if num_rows > 1 and out.stride(1) != 1:
        raise ValueError("out: the values of a row must be adjacent")
    if not weight.blocks.is_contiguous() or weight.blocks.data_ptr() % weight.quant_type.alignment:
        raise ValueError(f"{weight.quant_type.name} weights need adjacent rows at an aligned address")
    job = LinearJob(
        x=ActivationsArgument.of(x, weight.quant_type),
        weights=weight.blocks.data_ptr(),
        out=out.data_ptr(),
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_blocks=num_values // BLOCK_SIZE,
        row_bytes=weight.quant_type.row_bytes(num_values),
        out_stride=out.stride(0),
    )
    num_tiles = -(-num_rows // tiling.rows) * -(-num_tokens // tiling.tokens)
    program.kernel(instance(tiling)).launch(
        tiling.grid(num_tiles),
        tiling.threads,
        (job,),
        shared_bytes=tiling.shared_bytes,
        overlap=overlaps(num_tokens),
    )
