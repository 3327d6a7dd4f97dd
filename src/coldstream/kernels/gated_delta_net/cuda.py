"""The gated DeltaNet in CUDA C++: one launch for short chains and draft trees, three for long chains.

All walk the rows of a sequence in order with one and the same step, so that their bits are the same. Head
sizes 32, 64 and 128, 2 to 8 taps, and every key head read by some value head.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations, padded_cols
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.gated_delta_net.arguments import (
    HEAD_SIZES,
    TAPS,
    PrefillWorkspace,
    check_arguments,
    check_replay,
    has_trees,
    sizes,
)
from coldstream.kernels.ops import CommittedPath, DeltaNetInputs, DeltaNetWeights, RecurrentLayer

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
    is_slow=True,
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

    raw: DeviceArray
    arrivals: DeviceArray


def arrival_count(num_rows: int, num_key_heads: int, value_width: int) -> int:
    """Entries of `DecodeWorkspace.arrivals` for up to `num_rows` rows; value_width is NV · d."""
    return num_rows * (num_key_heads + padded_cols(value_width) // GROUP_SIZE)


@declared_in("gated_delta_net/layer.cuh", "DeltaLayer")
class _Layer(ctypes.Structure): ...


@declared_in("gated_delta_net/layer.cuh", "DeltaRows")
class _Rows(ctypes.Structure): ...


@declared_in("gated_delta_net/layer.cuh", "DeltaStates")
class _States(ctypes.Structure): ...


@declared_in("gated_delta_net/layer.cuh", "DeltaOutputs")
class _Outputs(ctypes.Structure): ...


@declared_in("gated_delta_net/gather.cuh")
class _Arrivals(ctypes.Structure): ...


@declared_in("gated_delta_net/replay.cu", "DeltaKept")
class _Kept(ctypes.Structure): ...


@declared_in("gated_delta_net/replay.cu", "DeltaPath")
class _Path(ctypes.Structure): ...


@declared_in("gated_delta_net/replay.cu", "ReplayedLayer")
class _Replayed(ctypes.Structure): ...


@declared_in("gated_delta_net/replay.cu")
class _ReplayedLayers(ctypes.Structure): ...


@declared_in("gated_delta_net/prefill.cu", "DeltaWorkspace")
class _Workspace(ctypes.Structure): ...


def delta_net_decode_cuda(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: DeviceArray,
    state: DeviceArray,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
    workspace: DecodeWorkspace,
    *,
    computes_chains: bool = True,
) -> None:
    """`Ops.gated_delta_net` for chains of a few rows and for draft trees: one launch.

    conv_state [states, taps − 1, C] and state [states, NV, d, d] are advanced by chains, and the inputs of
    trees kept. Writes contiguous float32 `out` [T, NV·d] and `quantized` (see `activations_from`), where
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
        (
            *arguments,
            workspace.raw,
            _Arrivals(readers=arrivals, finished=arrivals + 4 * readers),
            int(computes_chains),
        ),
        overlap=True,
    )


def delta_net_replay_cuda(
    layers: Sequence[RecurrentLayer], path: CommittedPath, readers: DeviceArray
) -> None:
    """`Ops.commit_delta_net`: a launch for every `MOST_REPLAYED` layers, which are alike, whatever the path.

    readers: int32 [layers, NK], zero before and after. What the path says must lie within the states and what
    is kept. ValueError if shapes disagree or are not supported.
    """
    check_replay(layers, path, readers)
    num_heads, size = layers[0].state.shape[1], layers[0].state.shape[-1]
    kernel = REPLAY.kernel(f"delta_replay<{size}, {layers[0].weights.conv_taps.shape[-1]}>")
    addresses = _Path(
        state_id=path.state_id.data_ptr(), count=path.count.data_ptr(), kept=path.kept.data_ptr()
    )
    for first in range(0, len(layers), MOST_REPLAYED):
        part = layers[first : first + MOST_REPLAYED]
        replayed = _ReplayedLayers()
        for place, layer in enumerate(part):
            kept = _Kept(
                qkv=layer.kept.qkv.data_ptr(),
                alpha=layer.kept.alpha.data_ptr(),
                beta=layer.kept.beta.data_ptr(),
            )
            states = _States(conv_state=layer.conv_state.data_ptr(), state=layer.state.data_ptr())
            replayed.at[place] = _Replayed(layer=_layer(layer.weights, num_heads), kept=kept, states=states)
        kernel.launch(
            (num_heads * size // COLUMNS_PER_BLOCK, len(part), 1),
            THREADS,
            (replayed, addresses, readers[first:]),
            overlap=True,
        )


def delta_net_prefill_cuda(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: DeviceArray,
    state: DeviceArray,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
    workspace: PrefillWorkspace,
) -> None:
    """As `delta_net_decode_cuda`, for chains of prefill: three launches. Rows of trees are left alone."""
    layer, rows, states, outputs = _arguments(inputs, weights, conv_state, state, out, quantized)
    num_rows, num_heads, size, taps = sizes(inputs, weights, state)
    num_spans, overlap = len(workspace.spans), overlaps(num_rows)
    work = _Workspace(
        **{name: tensor.data_ptr() for name, tensor in vars(workspace).items()}, num_spans=num_spans
    )
    PREFILL.kernel(f"delta_prepare<{size}, {taps}>").launch(
        (-(-num_rows // TILE_ROWS), 2 * weights.num_key_heads + num_heads + 1, 1),
        size,
        (layer, rows, states, work),
        overlap=overlap,
    )
    PREFILL.kernel(f"delta_recurrence<{size}>").launch(
        (num_heads * size // COLUMNS_PER_BLOCK, num_spans, 1),
        WALK_THREADS,
        (layer, rows, states, work, taps),
        overlap=overlap,
    )
    num_groups = padded_cols(num_heads * size) // GROUP_SIZE
    PREFILL.kernel(f"delta_output<{size}>").launch(
        (-(-num_rows * num_groups // OUTPUT_WARPS), 1, 1),
        OUTPUT_WARPS * 32,
        (layer, rows, states, outputs, work),
        overlap=overlap,
    )


def _arguments(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: DeviceArray,
    state: DeviceArray,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
) -> tuple[_Layer, _Rows, _States, _Outputs]:
    check_arguments(inputs, weights, conv_state, state, out, quantized)
    i, batch = inputs, inputs.rows.batch
    num_heads, size = state.shape[1], state.shape[-1]
    segments = i.rows.state_ids if batch is None else batch.segments
    rows = _Rows(
        qkv=i.qkv.data_ptr(),
        z=i.z.data_ptr(),
        alpha=i.alpha.data_ptr(),
        beta=i.beta.data_ptr(),
        qkv_stride=i.qkv.stride(0),
        z_stride=i.z.stride(0),
        alpha_stride=i.alpha.stride(0),
        beta_stride=i.beta.stride(0),
        state_ids=i.rows.state_ids.data_ptr(),
        segments=segments.data_ptr(),
        num_rows=i.qkv.shape[0],
    )
    if batch is not None and has_trees(i.rows):
        if batch.inputs is None:
            raise ValueError("rows of draft trees need a place to keep their inputs")
        rows.parents, rows.kept = batch.parents.data_ptr(), batch.kept.data_ptr()
        rows.kept_qkv = batch.inputs.qkv.data_ptr()
        rows.kept_alpha, rows.kept_beta = batch.inputs.alpha.data_ptr(), batch.inputs.beta.data_ptr()
    outputs = _Outputs(padded=padded_cols(num_heads * size))
    if out is not None:
        outputs.y = out.data_ptr()
    if quantized is not None:
        outputs.q, outputs.scales = quantized.q.data_ptr(), quantized.scales.data_ptr()
        outputs.sums = quantized.sums.data_ptr()
    states = _States(conv_state=conv_state.data_ptr(), state=state.data_ptr())
    return _layer(weights, num_heads), rows, states, outputs


def _layer(weights: DeltaNetWeights, num_heads: int) -> _Layer:
    return _Layer(
        conv_taps=weights.conv_taps.data_ptr(),
        a=weights.a.data_ptr(),
        dt_bias=weights.dt_bias.data_ptr(),
        norm=weights.norm.data_ptr(),
        key_head_ids=weights.key_head_ids.data_ptr(),
        num_key_heads=weights.num_key_heads,
        num_value_heads=num_heads,
        eps=weights.eps,
        has_sigmoid_gate=weights.output_gate == "sigmoid",
    )
