"""RMS norm in CUDA C++, with the sum before it and the quantisation after it in the same launch."""

import ctypes
from pathlib import Path

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations, padded_cols
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import Argument, CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.wait_answer import Answer
from coldstream.kernels.linear.records import BiasedOutput
from coldstream.kernels.ops import ExpertOutputs, PostNorms

# Keyed by whether all rows are aligned.
NORM, ADD = "rms_norm_rows<{}>", "add_rms_norm_rows<{}>"
ADD_BIASED = "add_rms_norm_rows<{}, true>"
PAIR = "rms_norm_pair_rows"  # of aligned rows only
COMBINE = "combine_rms_norm_rows<{}, {}>"
COMBINE_BIASED = "combine_rms_norm_rows<{}, no_shared, true>"
ADD_POST, COMBINE_POST = "add_post_norm_rows<{}>", "combine_post_norm_rows<{}, false>"
COMBINE_PARALLEL = "combine_post_norm_rows<{}, true>"
# As `SharedExpert` of expert_sum.cuh.
SHARED_KINDS = NO_SHARED, PLAIN_SHARED, GATED_SHARED = ("no_shared", "plain_shared", "gated_shared")
# Of kernels that sum experts, those without code for experts that are elsewhere.
ALONE = {
    **{
        COMBINE.format("{}", kind): f"combine_rms_norm_rows<{{}}, {kind}, false, true>"
        for kind in SHARED_KINDS
    },
    COMBINE_BIASED: "combine_rms_norm_rows<{}, no_shared, true, true>",
    COMBINE_POST: "combine_post_norm_rows<{}, false, true>",
    COMBINE_PARALLEL: "combine_post_norm_rows<{}, true, true>",
}
SHARED_ROWS = {COMBINE_PARALLEL: 2, ALONE[COMBINE_PARALLEL]: 2}  # of shared memory, if not 1
BIASED = {COMBINE_BIASED, ALONE[COMBINE_BIASED]}
PROGRAM = CudaProgram(
    Path(__file__).with_name("rms_norm.cu"),
    (
        PAIR,
        *(
            kernel.format(aligned)
            for kernel in (
                NORM,
                ADD,
                ADD_BIASED,
                *(COMBINE.format("{}", kind) for kind in SHARED_KINDS),
                COMBINE_BIASED,
                ADD_POST,
                COMBINE_POST,
                COMBINE_PARALLEL,
            )
            for aligned in ("true", "false")
        ),
    ),
    is_slow=True,
)
ALONE_PROGRAM = CudaProgram(
    Path(__file__).with_name("rms_norm.cu"),
    tuple(kernel.format(aligned) for kernel in ALONE.values() for aligned in ("true", "false")),
)
ALONE_ROWS = 132  # up to here each row has its own multiprocessor
THREADS_ALONE, THREADS_SHARING = 512, 128
MOST_THREADS, WARP_SIZE = 768, 32  # of a row's sum with biases, for which a thread waits twice for memory


def rms_norm_cuda(
    x: DeviceArray,
    weight: DeviceArray,
    eps: float,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
) -> None:
    """The norm of the rows of float32 x [T, E] by `weight` [E], as floats, quantised, or both.

    Writes contiguous float32 `out` [T, E] and `quantized` (see `activations_from`), where given. Rows of x
    may be apart. ValueError if shapes disagree.
    """
    args: list[Argument] = [x, x.stride(0)]
    _launch(NORM, args, (x,), x.stride(0), weight, eps, out, quantized)


def rms_norm_pair_cuda(
    x: DeviceArray,
    x_weight: DeviceArray,
    y: DeviceArray,
    y_weight: DeviceArray,
    eps: float,
    out: DeviceArray,
    quantized: QuantActivations,
) -> None:
    """`Ops.rms_norm_pair` of contiguous float32 x and y [T, E], into float32 `out` [T, 2·E] and `quantized`.

    ValueError if shapes disagree, rows are not whole groups, or they do not start on 16 bytes.
    """
    rows, cols = x.shape
    tensors = (x, y, x_weight, y_weight, out)
    if y.shape != x.shape or tuple(out.shape) != (rows, 2 * cols):
        raise ValueError(f"norms of rows {tuple(x.shape)} and {tuple(y.shape)} into {tuple(out.shape)}")
    if cols % GROUP_SIZE or any(t.data_ptr() % 16 or not t.is_contiguous() for t in tensors):
        raise ValueError(f"rows of {cols} values must be contiguous whole groups, and start on 16 bytes")
    if x_weight.numel() != cols or y_weight.numel() != cols:
        raise ValueError(f"rows of {cols} values have {x_weight.numel()} and {y_weight.numel()} weights")
    outputs = norm_outputs(rows, 2 * cols, out, quantized)
    PROGRAM.kernel(PAIR).launch(
        (2 * rows, 1, 1),
        THREADS_ALONE if 2 * rows <= ALONE_ROWS else THREADS_SHARING,
        (x, y, Norm(weight=x_weight.data_ptr(), cols=cols, padded=cols, eps=eps), y_weight, outputs),
        shared_bytes=4 * cols,
        overlap=overlaps(rows),
    )


def add_rms_norm_cuda(
    x: DeviceArray,
    update: DeviceArray | ExpertOutputs | BiasedOutput,
    total: DeviceArray,
    weight: DeviceArray,
    eps: float,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
) -> None:
    """Writes x + update into `total`, which may be x, and its norm as `rms_norm_cuda` does.

    x, total and a plain update are contiguous float32 [T, E]. A bias [E] is added to that first. Experts are
    summed as by `combine_experts`, with rows of host memory that the CPU has computed; the layer's times go
    to their `stamps`.
    """
    tensors: tuple[DeviceArray, ...]
    if not isinstance(update, ExpertOutputs):
        if isinstance(update, BiasedOutput):
            if update.bias.numel() != x.shape[1]:
                raise ValueError(f"a bias of {update.bias.numel()} values for rows {tuple(x.shape)}")
            kernel, tensors = ADD_BIASED, (x, update.values, total, update.bias)
            args: list[Argument] = [*tensors]
        else:
            kernel, tensors = ADD, (x, update, total)
            args = [*tensors, None]
        _launch(kernel, args, tensors, x.shape[1], weight, eps, out, quantized)
        return
    if update.routed.shape[::2] != x.shape:
        raise ValueError(f"outputs of experts {tuple(update.routed.shape)} for rows {tuple(x.shape)}")
    kind, of_experts = sum_of_experts(update)
    shared = () if update.shared is None else (update.shared,)
    tensors = (x, update.routed, *shared, total)
    kernel, bias, ids = COMBINE.format("{}", kind), None, None
    if update.bias is not None:
        bias, ids = _check_bias(update, kind)
        kernel, tensors = COMBINE_BIASED, (*tensors, bias)
    kernel = kernel if update.elsewhere is not None else ALONE[kernel]
    _launch(kernel, [x, *of_experts, total, bias, ids], tensors, x.shape[1], weight, eps, out, quantized)


def add_post_norm_cuda(
    x: DeviceArray,
    update: DeviceArray | ExpertOutputs,
    post: PostNorms,
    total: DeviceArray,
    weight: DeviceArray,
    eps: float,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
) -> None:
    """`Ops.add_post_norm` into `total`, which may be x, and its norm as `rms_norm_cuda` writes one.

    Otherwise as `add_rms_norm_cuda`. ValueError for biases of experts, and for a shared expert without a
    norm.
    """
    args: list[Argument] = []
    if not isinstance(update, ExpertOutputs):
        kernel, args = ADD_POST, [update]
        tensors: tuple[DeviceArray, ...] = (x, update, total)
    else:
        if update.routed.shape[::2] != x.shape:
            raise ValueError(f"outputs of experts {tuple(update.routed.shape)} for rows {tuple(x.shape)}")
        kind, args = sum_of_experts(update)
        kernel, expected = (
            (COMBINE_POST, NO_SHARED) if post.routed is None else (COMBINE_PARALLEL, PLAIN_SHARED)
        )
        if kind != expected or update.bias is not None:
            raise ValueError(f"norms of outputs of experts with {kind}, expected {expected} and no biases")
        kernel = kernel if update.elsewhere is not None else ALONE[kernel]
        tensors = (x, update.routed, total)
        if post.routed is not None:
            tensors = (*tensors, update.shared, post.routed, post.shared)
    if any(vector is not None and vector.numel() != x.shape[1] for vector in (post.weight, post.routed)):
        raise ValueError(f"norms of outputs with {post.weight.numel()} weights for rows {tuple(x.shape)}")
    norms = PostNorm(
        weight=post.weight.data_ptr(),
        routed=None if post.routed is None else post.routed.data_ptr(),
        shared=None if post.routed is None else post.shared.data_ptr(),
        scale=None if post.scale is None else post.scale.data_ptr(),
    )
    tensors = (*tensors, post.weight)
    _launch(kernel, [x, *args, total, norms], tensors, x.shape[1], weight, eps, out, quantized)


def _check_bias(update: ExpertOutputs, kind: str) -> tuple[DeviceArray, DeviceArray]:
    """The biases of the experts' outputs, and the experts. ValueError if they do not fit."""
    ids = update.routing.ids
    check_array("ids", ids, "int32")
    if kind != NO_SHARED or update.bias.shape[1:] != update.routed.shape[2:]:
        raise ValueError(f"biases {tuple(update.bias.shape)} of experts, beside one that is {kind}")
    if tuple(ids.shape) != tuple(update.routed.shape[:2]):
        raise ValueError(f"experts {tuple(ids.shape)} for outputs {tuple(update.routed.shape)}")
    return update.bias, ids


def sum_of_experts(update: ExpertOutputs) -> tuple[str, list[Argument]]:
    """How kernels add the shared expert, and what they take for the sum of the experts (`ExpertWait`).

    ValueError if shapes disagree.
    """
    topk_weights, shared_gate = update.routing.weights, update.routing.shared_gate
    rows, num_ranks, _ = update.routed.shape
    if tuple(topk_weights.shape) != (rows, num_ranks):
        raise ValueError(f"weights {tuple(topk_weights.shape)} of experts for {rows} rows of {num_ranks}")
    if not all(weights is None or weights.is_contiguous() for weights in (topk_weights, shared_gate)):
        raise ValueError("the weights of experts must be contiguous")
    if update.shared is None and shared_gate is not None:
        raise ValueError("a gate without its shared expert")
    elsewhere = update.elsewhere
    cpu_ids, cpu_rows, answer, stamps = (None, None, Answer(), None)
    if elsewhere is not None:
        cpu_ids, cpu_rows, stamps = elsewhere.ids, elsewhere.rows, elsewhere.stamps
        answer = Answer(done=elsewhere.done.data_ptr(), late=elsewhere.done[1:].data_ptr())
        answer.rows_are_marked = elsewhere.is_marked
    ungated = NO_SHARED if update.shared is None else PLAIN_SHARED
    return ungated if shared_gate is None else GATED_SHARED, [
        update.routed, topk_weights, num_ranks, update.shared, shared_gate, cpu_ids, cpu_rows, answer, stamps,
    ]  # fmt: skip


@declared_in("rms_norm/norm_row.cuh")
class Norm(ctypes.Structure): ...


@declared_in("rms_norm/norm_row.cuh")
class PostNorm(ctypes.Structure): ...


@declared_in("rms_norm/norm_row.cuh")
class NormOutputs(ctypes.Structure): ...


def norm_outputs(
    rows: int, cols: int, out: DeviceArray | None, quantized: QuantActivations | None
) -> NormOutputs:
    """Where kernels write rows of `cols` values, as floats or quantised. ValueError for codes of others."""
    outputs = NormOutputs()
    if out is not None:
        outputs.y = out.data_ptr()
    if quantized is not None:
        if tuple(quantized.q.shape) != (rows, padded_cols(cols)):
            raise ValueError(f"codes of shape {tuple(quantized.q.shape)} for rows {(rows, cols)}")
        outputs.q, outputs.scales = quantized.q.data_ptr(), quantized.scales.data_ptr()
        outputs.sums = quantized.sums.data_ptr()
    return outputs


def _launch(
    kernel: str,
    args: list[Argument],
    tensors: tuple[DeviceArray, ...],
    stride: int,
    weight: DeviceArray,
    eps: float,
    out: DeviceArray | None,
    quantized: QuantActivations | None,
) -> None:
    rows, cols = tensors[0].shape
    padded = padded_cols(cols)
    outputs = norm_outputs(rows, cols, out, quantized)
    if out is not None:
        tensors = (*tensors, out)
    # Only x of the plain norm may have a row stride.
    if weight.numel() != cols or not all(t.is_contiguous() for t in tensors[stride != cols :]):
        raise ValueError(f"rows of {cols} values must be contiguous, and have {weight.numel()} weights")
    addresses = [tensor.data_ptr() for tensor in (weight, *tensors)]
    aligned = (cols | stride) % 4 == 0 and all(address % 16 == 0 for address in addresses)
    threads = THREADS_ALONE if rows <= ALONE_ROWS else THREADS_SHARING
    if kernel in BIASED and threads == THREADS_ALONE:
        threads = min(max(threads, -(-cols // (4 * WARP_SIZE)) * WARP_SIZE), MOST_THREADS)
    program = ALONE_PROGRAM if kernel in ALONE.values() else PROGRAM
    program.kernel(kernel.format(str(aligned).lower())).launch(
        (rows, 1, 1),
        threads,
        (*args, Norm(weight=weight.data_ptr(), cols=cols, padded=padded, eps=eps), outputs),
        shared_bytes=SHARED_ROWS.get(kernel, 1) * 4 * padded,
        overlap=overlaps(rows),
    )
