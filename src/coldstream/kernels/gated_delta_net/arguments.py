"""What the launchers of the gated DeltaNet's GPU kernels share: arguments, workspaces, checks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coldstream.kernels.arithmetic.quantised import QuantActivations, padded_cols
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.ops import (
    MAX_TREE_ROWS,
    CommittedPath,
    DeltaNetInputs,
    DeltaNetWeights,
    RecurrentLayer,
    Rows,
)

HEAD_SIZES, TAPS = (32, 64, 128), range(2, 9)


@dataclass(frozen=True)
class PrefillWorkspace:
    """Contiguous float32 and int32; spans are zero at first and left zero."""

    keys: DeviceArray  # [T, 2 · NK · d]
    values: DeviceArray  # [T, NV · d]
    gates: DeviceArray  # [T, NV, 2]
    raw: DeviceArray  # [T, NV · d]
    spans: DeviceArray  # int32 [segments, 2], at least those of the step


def sizes(inputs: DeltaNetInputs, weights: DeltaNetWeights, state: DeviceArray) -> tuple[int, int, int, int]:
    """Rows, value heads, head size, taps."""
    return inputs.qkv.shape[0], state.shape[1], state.shape[-1], weights.conv_taps.shape[-1]


def has_trees(rows: Rows) -> bool:
    """Whether there may be draft trees among the rows."""
    return rows.batch is not None and rows.batch.has_trees


def check_arguments(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: DeviceArray,
    state: DeviceArray,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
) -> None:
    """ValueError if shapes or strides are not those of `Ops.gated_delta_net`, or no kernel has them."""
    num_rows, num_heads, size, taps = sizes(inputs, weights, state)
    _check_kernel(size, taps)
    width, channels = num_heads * size, (2 * weights.num_key_heads + num_heads) * size
    wanted = {
        "qkv": (inputs.qkv, (num_rows, channels)),
        "z": (inputs.z, (num_rows, width)),
        "alpha": (inputs.alpha, (num_rows, num_heads)),
        "beta": (inputs.beta, (num_rows, num_heads)),
        "state_ids": (inputs.rows.state_ids, (num_rows,)),
        "conv_taps": (weights.conv_taps, (channels, taps)),
        "conv_state": (conv_state, (state.shape[0], taps - 1, channels)),
        "state": (state, (state.shape[0], num_heads, size, size)),
    }
    if out is not None:
        wanted["out"] = (out, (num_rows, width))
    if quantized is not None:
        wanted["codes"] = (quantized.q, (num_rows, padded_cols(width)))
    _check_tensors(wanted, rows_may_be_apart=("qkv", "z", "alpha", "beta"))
    if (inputs.z.stride(0) * 4 | inputs.z.data_ptr()) % 16:
        raise ValueError("rows of z must start on 16 bytes")


def check_replay(layers: Sequence[RecurrentLayer], path: CommittedPath, readers: DeviceArray) -> None:
    """ValueError if shapes or strides are not those of `Ops.commit_delta_net`, differ between layers, or no
    kernel has them.
    """
    num_states, num_heads, size = layers[0].state.shape[:3]
    num_key_heads, taps = layers[0].weights.num_key_heads, layers[0].weights.conv_taps.shape[-1]
    channels, num_kept = (2 * num_key_heads + num_heads) * size, layers[0].kept.qkv.shape[0]
    _check_kernel(size, taps)
    for layer in layers:
        _check_tensors(
            {
                "conv_taps": (layer.weights.conv_taps, (channels, taps)),
                "conv_state": (layer.conv_state, (num_states, taps - 1, channels)),
                "state": (layer.state, (num_states, num_heads, size, size)),
                "kept qkv": (layer.kept.qkv, (num_kept, channels)),
                "kept alpha": (layer.kept.alpha, (num_kept, num_heads)),
                "kept beta": (layer.kept.beta, (num_kept, num_heads)),
            }
        )
    _check_tensors(
        {
            "state_id": (path.state_id, (1,)),
            "count": (path.count, (1,)),
            "kept": (path.kept, (MAX_TREE_ROWS,)),
            "readers": (readers, (len(layers), num_key_heads)),
        }
    )


def _check_kernel(size: int, taps: int) -> None:
    if size not in HEAD_SIZES or taps not in TAPS:
        raise ValueError(f"no kernel for heads of {size} and {taps} taps")


def _check_tensors(
    wanted: Mapping[str, tuple[DeviceArray, tuple[int, ...]]], rows_may_be_apart: Collection[str] = ()
) -> None:
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
        if tensor.stride(-1) != 1 or (name not in rows_may_be_apart and not tensor.is_contiguous()):
            raise ValueError(f"{name} has strides {tensor.stride()}")
