"""Hyper-connections in CUDA C++: the update of all streams with their norms in one launch, and the mixture.

A block takes a row, or in a decode step a stream of one, and keeps it in shared memory. Streams have a
multiple of 8 values.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations, padded_cols
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import Argument, CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.linear.cuda import linear_skinny_cuda, shares_passes
from coldstream.kernels.ops import ExpertOutputs
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.rms_norm.cuda import SHARED_KINDS, Norm, norm_outputs, sum_of_experts

INJECT, SCALED_SILU, MIX = "inject_norm_rows", "scaled_silu_rows<{}>", "mix_stream_rows"
NORM = "norm_stream_rows"
INJECT_EXPERTS = "inject_experts_norm_rows<{}>"
PROGRAM = CudaProgram(
    Path(__file__).with_name("hyper_connections.cu"),
    (
        INJECT,
        NORM,
        MIX,
        *(INJECT_EXPERTS.format(kind) for kind in SHARED_KINDS),
        *(SCALED_SILU.format(aligned) for aligned in ("true", "false")),
    ),
)
MAX_STREAMS, MAX_WIDTH = 8, 12288  # of all streams together: what a block's shared memory holds on every card
SIZE_MULTIPLE = 8
THREADS, MOST_THREADS, MAX_WARPS, WARP_SIZE = 512, 640, 4, 32
MOST_PARTED_ROWS = 16  # up to here a stream has a block of its own, which sums the experts again
ALONE_ROWS = 64  # up to here every group of a row may have its own multiprocessor


@declared_in("hyper_connections/hyper_connections.cu")
class StreamRows(ctypes.Structure): ...


def inject_norm_cuda(
    streams: DeviceArray | None,
    update: DeviceArray | ExpertOutputs,
    injection: DeviceArray | None,
    total: DeviceArray,
    weight: DeviceArray,
    eps: float,
    out: DeviceArray,
    quantized: QuantActivations,
) -> None:
    """`Ops.inject_norm`: writes the streams into `total` [T, C·E], which may be `streams`, and their norms.

    streams, a plain update [T, E], injection [T, C] and weight [C·E] are contiguous float32, as are `total`
    and `out` [T, C·E]; `quantized` is for `out`. Experts are summed as by `add_rms_norm_cuda`. ValueError if
    shapes disagree or no kernel has them.
    """
    outputs = update.routed if isinstance(update, ExpertOutputs) else update
    rows, size, width = outputs.shape[0], outputs.shape[-1], weight.numel()
    args: list[Argument]
    num_streams = width // size
    _check_streams(num_streams, size, width)
    if (streams is None) != (injection is None):
        raise ValueError("streams and the weights of their update come together")
    wanted = {
        "streams": (streams, (rows, width)),
        "the injection": (injection, (rows, num_streams)),
        "the total": (total, (rows, width)),
        "the output": (out, (rows, width)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and (tuple(tensor.shape) != shape or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be {list(shape)} and contiguous, not {list(tensor.shape)}")
    _check_aligned(*(tensor for tensor in (streams, outputs, total, weight, out) if tensor is not None))
    work = StreamRows(sum=total.data_ptr(), num_streams=num_streams, size=size)
    if streams is not None and injection is not None:
        work.x, work.injection = streams.data_ptr(), injection.data_ptr()
    kernel, args = INJECT, [outputs]
    if isinstance(update, ExpertOutputs):
        kind, args = sum_of_experts(update)
        if update.bias is not None:
            raise ValueError("no kernel adds biases of experts to streams")
        if update.elsewhere is not None and update.elsewhere.is_marked:
            raise ValueError("several blocks read a row of experts, so that none of them can mark it")
        kernel = INJECT_EXPERTS.format(kind)
        if update.shared is not None:
            _check_aligned(update.shared)
    padded = padded_cols(width)
    norm = Norm(weight=weight.data_ptr(), cols=width, padded=padded, eps=eps)
    grid, threads, shared_bytes = _norm_grid(rows, num_streams, size, padded)
    PROGRAM.kernel(kernel).launch(
        grid,
        threads,
        (work, *args, norm, norm_outputs(rows, width, out, quantized)),
        shared_bytes=shared_bytes,
        overlap=overlaps(rows),
    )


def norm_streams_cuda(
    x: DeviceArray,
    num_streams: int,
    weight: DeviceArray,
    eps: float,
    out: DeviceArray,
    quantized: QuantActivations,
) -> None:
    """`Ops.norm_streams` of contiguous float32 [T, C·E], into contiguous `out` and `quantized`.

    ValueError if shapes disagree or no kernel has them.
    """
    rows, width = x.shape
    _check_streams(num_streams, width // num_streams, width)
    if out.shape != x.shape or weight.numel() != width or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"norms {list(out.shape)} of streams {[rows, width]}, which must be contiguous")
    _check_aligned(x, weight, out)
    padded = padded_cols(width)
    norm = Norm(weight=weight.data_ptr(), cols=width, padded=padded, eps=eps)
    grid, threads, shared_bytes = _norm_grid(rows, num_streams, width // num_streams, padded)
    PROGRAM.kernel(NORM).launch(
        grid,
        threads,
        (x, num_streams, width // num_streams, norm, norm_outputs(rows, width, out, quantized)),
        shared_bytes=shared_bytes,
        overlap=overlaps(rows),
    )


def scaled_silu_cuda(x: DeviceArray, divisor: int, out: DeviceArray, quantized: QuantActivations) -> None:
    """silu(x / divisor) of contiguous float32 x [T, F], into contiguous `out` and `quantized`.

    ValueError if shapes disagree.
    """
    rows, cols = x.shape
    if out.shape != x.shape or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"an output {list(out.shape)} for rows {[rows, cols]}, both contiguous")
    padded = padded_cols(cols)
    aligned = cols % 4 == 0 and (x.data_ptr() | out.data_ptr()) % 16 == 0
    grid, threads = _grid(rows, padded)
    PROGRAM.kernel(SCALED_SILU.format(str(aligned).lower())).launch(
        grid,
        threads,
        (x, float(divisor), cols, padded, norm_outputs(rows, cols, out, quantized)),
        overlap=overlaps(rows),
    )


def low_rank_cuda(
    weights: Sequence[QuantTensor],
    x: DeviceArray,
    codes: QuantActivations,
    outs: Sequence[DeviceArray],
    divisor: int,
    opened: Activations,
) -> None:
    """The products of one row x [1, K] with the weights, into `outs`; of the first silu(y / divisor) instead,
    into `opened`, whose codes no one may read. One launch where a block's warps share the passes, else two.
    """
    if shares_passes(weights):
        products = (opened.values, *outs[1:])
        linear_skinny_cuda(weights, products, activations=codes, x=x, silu_divisor=divisor)
        return
    linear_skinny_cuda(weights, outs, activations=codes, x=x)
    scaled_silu_cuda(outs[0], divisor, opened.values, opened.quantised)


def mix_streams_cuda(
    normed: DeviceArray, gates: DeviceArray, out: DeviceArray, quantized: QuantActivations
) -> None:
    """`Ops.mix_streams` of contiguous float32 [T, C·E], into contiguous `out` [T, E] and `quantized`.

    ValueError if shapes disagree or no kernel has them.
    """
    (rows, width), size = normed.shape, out.shape[1]
    _check_streams(width // size, size, width)
    if gates.shape != normed.shape or out.shape[0] != rows:
        raise ValueError(f"gates {list(gates.shape)} and {list(out.shape)} for streams {[rows, width]}")
    if not all(tensor.is_contiguous() for tensor in (normed, gates, out)):
        raise ValueError("streams and their gates must be contiguous")
    _check_aligned(normed, gates, out)
    padded = padded_cols(size)
    grid, threads = _grid(rows, padded)
    PROGRAM.kernel(MIX).launch(
        grid,
        threads,
        (normed, gates, width // size, size, padded, norm_outputs(rows, size, out, quantized)),
        overlap=overlaps(rows),
    )


def _norm_grid(rows: int, num_streams: int, size: int, padded: int) -> tuple[tuple[int, int, int], int, int]:
    """Blocks, threads and shared memory of norms: a block for a row. In a decode step it has a stream,
    if no group lies in two.
    """
    if rows > MOST_PARTED_ROWS or size % GROUP_SIZE:
        return (rows, 1, 1), THREADS, 4 * padded
    threads = min(MOST_THREADS, -(-size // 4 // WARP_SIZE) * WARP_SIZE)
    return (rows, num_streams, 1), threads, 4 * size


def _grid(rows: int, padded: int) -> tuple[tuple[int, int, int], int]:
    """Blocks and threads for a warp a group of each row."""
    groups = padded // GROUP_SIZE
    warps = 1 if rows <= ALONE_ROWS else min(MAX_WARPS, groups)
    return (rows, -(-groups // warps), 1), warps * WARP_SIZE


def _check_streams(num_streams: int, size: int, width: int) -> None:
    if num_streams * size != width or size % SIZE_MULTIPLE:
        raise ValueError(f"{width} values of streams of {size}: whole streams, of a multiple of 8 each")
    if not 1 < num_streams <= MAX_STREAMS or width > MAX_WIDTH:
        raise ValueError(f"no kernel for {num_streams} streams of {size} values")


def _check_aligned(*tensors: DeviceArray) -> None:
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        raise ValueError("streams and what is added to them must start on 16 bytes")
