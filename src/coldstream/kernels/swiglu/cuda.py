"""The gated activation in CUDA C++, with the quantisation after it in the same launch."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations, padded_cols
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.ops import GATED_UNITS, SWIGLU, Activation, ExpertBiases
from coldstream.kernels.quantize.cuda import INSTANCES, scale_size_of


def _instance(is_aligned: bool, scale_size: int, unit: int) -> str:
    of_unit = f", {unit}" if unit else ""
    return f"swiglu_rows<{str(is_aligned).lower()}, {scale_size}{of_unit}>"


PROGRAM = CudaProgram(
    Path(__file__).with_name("swiglu.cu"),
    tuple(
        _instance(aligned, size, number)
        for number in range(len(GATED_UNITS))
        for aligned in (True, False)
        for size in INSTANCES
    ),
)
MAX_WARPS = 4
WARP_SIZE = 32
ALONE_ROWS = 64  # up to here every group of a row may have its own multiprocessor


@declared_in("swiglu/swiglu.cu")
class GluOptions(ctypes.Structure): ...


@dataclass(frozen=True)
class PlacedBiases:
    """Biases of the rows of pairs in the order of their experts."""

    biases: ExpertBiases
    pairs: DeviceArray  # int32 [T], by row; any number for rows that nobody computes
    ids: DeviceArray  # int32, contiguous, by pair; −1 for pairs of no expert


def swiglu_cuda(
    gate: DeviceArray,
    up: DeviceArray,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
    activation: Activation = SWIGLU,
    biases: PlacedBiases | None = None,
    *,
    tokens: int | None = None,
) -> None:
    """The gated unit of both, float32 [T, F] with any row stride, as floats, quantised, or both.

    biases: of gate and up, for other units than SwiGLU. tokens: of the step, if rows are its pairs.

    Writes contiguous float32 `out` [T, F] and `quantized` (see `activations_from`; the shape of its scales
    gives the values per scale), where given. ValueError if shapes disagree.
    """
    rows, cols = gate.shape
    padded = padded_cols(cols)
    if up.shape != gate.shape or gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError(
            f"gates {tuple(gate.shape)} and values {tuple(up.shape)} differ, or have strided columns"
        )
    if out is not None and (out.shape != gate.shape or not out.is_contiguous()):
        raise ValueError(f"an output {tuple(out.shape)} for rows {(rows, cols)}")
    if quantized is not None and tuple(quantized.q.shape) != (rows, padded):
        raise ValueError(f"codes of shape {tuple(quantized.q.shape)} for rows {(rows, cols)}")
    options = _options(activation, biases, rows, cols)
    addresses = gate.data_ptr() | up.data_ptr() | (0 if out is None else out.data_ptr())
    addresses |= (options.gate_bias or 0) | (options.up_bias or 0)
    aligned = addresses % 16 == 0 and (cols | gate.stride(0) | up.stride(0)) % 4 == 0
    groups = padded // GROUP_SIZE
    warps = 1 if rows <= ALONE_ROWS else min(MAX_WARPS, groups)
    codes = (None, None, None) if quantized is None else (quantized.q, quantized.scales, quantized.sums)
    scale_size = GROUP_SIZE if quantized is None else scale_size_of(quantized)
    PROGRAM.kernel(_instance(aligned, scale_size, activation.number)).launch(
        (rows, -(-groups // warps), 1),
        warps * WARP_SIZE,
        (gate, gate.stride(0), up, up.stride(0), cols, padded, out, *codes, options),
        overlap=overlaps(rows if tokens is None else tokens),
    )


def _options(activation: Activation, placed: PlacedBiases | None, rows: int, cols: int) -> GluOptions:
    """What kernels take. ValueError for biases that do not fit."""
    options = GluOptions(limit=activation.limit)
    if placed is None:
        return options
    biases = placed.biases
    num_experts = len(biases.gate)
    for bias in (biases.gate, biases.up):
        check_array("bias", bias, "float32")
        if tuple(bias.shape) != (num_experts, cols) or len(placed.pairs) != rows:
            raise ValueError(f"biases {tuple(bias.shape)} for rows {(rows, cols)}")
    if activation.kind == "swiglu":
        raise ValueError("no kernel adds biases before SwiGLU")
    options.gate_bias, options.up_bias = biases.gate.data_ptr(), biases.up.data_ptr()
    options.pairs, options.ids = placed.pairs.data_ptr(), placed.ids.data_ptr()
    options.num_pairs, options.num_experts = placed.ids.numel(), num_experts
    return options
