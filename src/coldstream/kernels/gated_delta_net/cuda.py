"""The gated DeltaNet in CUDA C++: one launch for short chains and draft trees, three for long chains.

All walk the rows of a sequence in order with one and the same step, so that their bits are the same. Head
sizes 32, 64 and 128, 2 to 8 taps, and every key head read by some value head.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coldstream.kernels.arithmetic.reference import GROUP_SIZE, QuantActivations, padded_cols
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.gated_delta_net.arguments import (
    HEAD_SIZES,
    TAPS,
    DeltaNetInputs,
    PrefillWorkspace,
    check_arguments,
    check_replay,
    has_trees,
    sizes,
)
from coldstream.kernels.ops import CommittedPath, DeltaNetWeights, RecurrentLayer

DECODE = CudaProgram(
    Path(__file__).with_name("decode.cu"),
    [
        f"delta_decode<{d}, {taps}, {trees}>"
        for d in HEAD_SIZES
        for taps in TAPS
        for trees in ("false", "true")
    ],
)
REPLAY = CudaProgram(
    Path(__file__).with_name("replay.cu"), [f"delta_replay<{d}, {taps}>" for d in HEAD_SIZES for taps in TAPS]
)
MOST_REPLAYED = 32  # layers of a launch, as in replay.cu
PREFILL = CudaProgram(
    Path(__file__).with_name("prefill.cu"),
    [
        *(f"delta_prepare<{d}, {taps}>" for d in HEAD_SIZES for taps in TAPS),
        *(f"{kernel}<{d}>" for kernel in ("delta_recurrence", "delta_output") for d in HEAD_SIZES),
    ],
)
# As the kernels have them.
COLUMNS_PER_BLOCK, THREADS = 32, 128
WALK_THREADS = 160
BLOCKS_PER_GROUP = GROUP_SIZE // COLUMNS_PER_BLOCK
TILE_ROWS = 16
OUTPUT_WARPS = 8


@dataclass(frozen=True)
class DecodeWorkspace:
    """raw float32 [T, NV·d]; arrivals int32 [`arrival_count`], zero at first and left zero."""

    raw: torch.Tensor
    arrivals: torch.Tensor


def arrival_count(num_rows: int, num_key_heads: int, value_width: int) -> int:
    """Entries of `DecodeWorkspace.arrivals` for up to `num_rows` rows; value_width is NV · d."""
    return num_rows * (num_key_heads + padded_cols(value_width) // GROUP_SIZE)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("conv_taps", "a", "dt_bias", "norm", "key_head_ids")),
        *((name, ctypes.c_int32) for name in ("num_key_heads", "num_value_heads")),
        ("eps", ctypes.c_float),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "z", "alpha", "beta")),
        *((name, ctypes.c_int32) for name in ("qkv_stride", "z_stride", "alpha_stride", "beta_stride")),
        *(
            (name, ctypes.c_void_p)
            for name in ("state_ids", "segments", "parents", "kept", "kept_qkv", "kept_alpha", "kept_beta")
        ),
        ("num_rows", ctypes.c_int32),
    )


class _States(ctypes.Structure):
    _fields_ = (("conv_state", ctypes.c_void_p), ("state", ctypes.c_void_p))


class _Outputs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "q", "scales", "sums")),
        ("padded", ctypes.c_int32),
    )


class _Pointers2(ctypes.Structure):
    _fields_ = (("readers", ctypes.c_void_p), ("finished", ctypes.c_void_p))


class _Kept(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("qkv", "alpha", "beta"))


class _Path(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("state_id", "count", "kept"))


class _Replayed(ctypes.Structure):
    _fields_ = (("layer", _Layer), ("kept", _Kept), ("states", _States))


class _ReplayedLayers(ctypes.Structure):
    _fields_ = (("at", _Replayed * MOST_REPLAYED),)


class _Workspace(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "gates", "raw", "spans")),
        ("num_spans", ctypes.c_int32),
    )


def delta_net_decode_cuda(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor | None,
    quantized: QuantActivations | None,
    workspace: DecodeWorkspace,
    *,
    computes_chains: bool = True,
) -> None:
    """`Ops.gated_delta_net` for chains of a few rows and for draft trees: one launch.

    conv_state [states, taps − 1, C] and state [states, NV, d, d] are advanced by chains, and the inputs of
    trees kept. Writes contiguous float32 `out` [T, NV·d] and `quantized` (see `empty_activations`), where
    given, zeros for rows of state −1; without computes_chains only the rows of trees. What rows are must lie
    within the states, and nothing that may still be in flight may write it. ValueError if shapes disagree or
    are not supported, if trees have no place for their inputs, or if there is nothing to compute.
    """
    if not computes_chains and not has_trees(inputs.rows):
        raise ValueError(
            "without chains and without draft trees nothing is left to compute: do not call this"
        )
    arguments = _arguments(inputs, weights, conv_state, state, out, quantized)
    num_rows, num_heads, size, taps = sizes(inputs, weights, state)
    readers = num_rows * weights.num_key_heads
    if workspace.arrivals.numel() < arrival_count(num_rows, weights.num_key_heads, num_heads * size):
        raise ValueError(f"{workspace.arrivals.numel()} arrivals for {num_rows} rows")
    arrivals = workspace.arrivals.data_ptr()
    trees = str(has_trees(inputs.rows)).lower()
    DECODE.kernel(f"delta_decode<{size}, {taps}, {trees}>").launch(
        (padded_cols(num_heads * size) // GROUP_SIZE * BLOCKS_PER_GROUP, num_rows, 1),
        THREADS,
        (*arguments, workspace.raw, _Pointers2(arrivals, arrivals + 4 * readers), int(computes_chains)),
        overlap=True,
    )


def delta_net_replay_cuda(
    layers: Sequence[RecurrentLayer], path: CommittedPath, readers: torch.Tensor
) -> None:
    """`Ops.commit_delta_net`: a launch for every `MOST_REPLAYED` layers, which are alike, whatever the path.

    readers: int32 [layers, NK], zero before and after. What the path says must lie within the states and what
    is kept. ValueError if shapes disagree or are not supported.
    """
    check_replay(layers, path, readers)
    num_heads, size = layers[0].state.shape[1], layers[0].state.shape[-1]
    kernel = REPLAY.kernel(f"delta_replay<{size}, {layers[0].weights.conv_taps.shape[-1]}>")
    addresses = _Path(path.state_id.data_ptr(), path.count.data_ptr(), path.kept.data_ptr())
    for first in range(0, len(layers), MOST_REPLAYED):
        part = layers[first : first + MOST_REPLAYED]
        replayed = _ReplayedLayers()
        for place, layer in enumerate(part):
            kept = (layer.kept.qkv.data_ptr(), layer.kept.alpha.data_ptr(), layer.kept.beta.data_ptr())
            states = _States(layer.conv_state.data_ptr(), layer.state.data_ptr())
            replayed.at[place] = _Replayed(_layer(layer.weights, num_heads), _Kept(*kept), states)
        kernel.launch(
            (num_heads * size // COLUMNS_PER_BLOCK, len(part), 1),
            THREADS,
            (replayed, addresses, readers[first:]),
            overlap=True,
        )


def delta_net_prefill_cuda(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor | None,
    quantized: QuantActivations | None,
    workspace: PrefillWorkspace,
) -> None:
    """As `delta_net_decode_cuda`, for chains of many rows: three launches. Rows of trees are left alone."""
    layer, rows, states, outputs = _arguments(inputs, weights, conv_state, state, out, quantized)
    num_rows, num_heads, size, taps = sizes(inputs, weights, state)
    num_spans = len(workspace.spans)
    work = _Workspace(*(tensor.data_ptr() for tensor in vars(workspace).values()), num_spans)
    PREFILL.kernel(f"delta_prepare<{size}, {taps}>").launch(
        (-(-num_rows // TILE_ROWS), 2 * weights.num_key_heads + num_heads + 1, 1),
        size,
        (layer, rows, states, work),
    )
    PREFILL.kernel(f"delta_recurrence<{size}>").launch(
        (num_heads * size // COLUMNS_PER_BLOCK, num_spans, 1),
        WALK_THREADS,
        (layer, rows, states, work, taps),
    )
    num_groups = padded_cols(num_heads * size) // GROUP_SIZE
    PREFILL.kernel(f"delta_output<{size}>").launch(
        (-(-num_rows * num_groups // OUTPUT_WARPS), 1, 1),
        OUTPUT_WARPS * 32,
        (layer, rows, states, outputs, work),
    )


def _arguments(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor | None,
    quantized: QuantActivations | None,
) -> tuple[_Layer, _Rows, _States, _Outputs]:
    check_arguments(inputs, weights, conv_state, state, out, quantized)
    i, batch = inputs, inputs.rows.batch
    num_heads, size = state.shape[1], state.shape[-1]
    projections = (i.qkv, i.z, i.alpha, i.beta)
    state_ids = i.rows.state_ids
    segments = state_ids if batch is None else batch.segments
    trees: tuple[torch.Tensor | None, ...] = (None,) * 5
    if batch is not None and has_trees(i.rows):
        if batch.inputs is None:
            raise ValueError("rows of draft trees need a place to keep their inputs")
        trees = (batch.parents, batch.kept, batch.inputs.qkv, batch.inputs.alpha, batch.inputs.beta)
    rows = _Rows(
        *(tensor.data_ptr() for tensor in projections),
        *(tensor.stride(0) for tensor in projections),
        *(None if tensor is None else tensor.data_ptr() for tensor in (state_ids, segments, *trees)),
        i.qkv.shape[0],
    )
    parts = (None, None, None) if quantized is None else (quantized.q, quantized.scales, quantized.sums)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (out, *parts))
    outputs = _Outputs(*pointers, padded_cols(num_heads * size))
    states = _States(conv_state.data_ptr(), state.data_ptr())
    return _layer(weights, num_heads), rows, states, outputs


def _layer(weights: DeltaNetWeights, num_heads: int) -> _Layer:
    w = weights
    tensors = (w.conv_taps, w.a, w.dt_bias, w.norm, w.key_head_ids)
    return _Layer(*(tensor.data_ptr() for tensor in tensors), w.num_key_heads, num_heads, w.eps)
