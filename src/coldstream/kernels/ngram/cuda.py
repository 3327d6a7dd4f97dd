"""The n-gram embedding in CUDA C++. Rows of the table are the host's: a launch asks for them, another takes
them, and what does not need them runs between the two.
"""

import ctypes
from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations, padded_cols
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.dequantize.cuda import traits_of
from coldstream.kernels.experts.wait_answer import Answer, wait_answer_cuda
from coldstream.kernels.ngram.mailbox import NgramMailbox
from coldstream.kernels.ops import CommittedPath, NgramHash, NgramState, Rows
from coldstream.kernels.rms_norm.cuda import norm_outputs

IDS, GATE, CONV, ADVANCE, COMMIT = (
    "ngram_ids", "ngram_gate_rows", "ngram_conv_rows", "ngram_advance", "ngram_commit",
)  # fmt: skip
PROGRAM = CudaProgram(Path(__file__).with_name("ngram.cu"), (IDS, GATE, CONV, ADVANCE, COMMIT))


def instance_of(quant_type: QuantType) -> str:
    """The kernel that takes rows of a type."""
    return f"coldstream::ngram_take_rows<{traits_of(quant_type)}>"


ROWS_PROGRAM = CudaProgram(Path(__file__).with_name("take_rows.cu"), tuple(map(instance_of, QuantType)))
# As the kernels have them.
IDS_THREADS, TAKE_WARPS, GATE_WARPS, CONV_COLUMNS, TILE_ROWS = 1024, 4, 4, 128, 16
MOST_TOKENS, MOST_HEADS, MOST_HISTORY, TAPS = 4, 192, 16, range(2, 17)
COLS_MULTIPLE = 8  # of a row's n-grams side by side
MOST_WAITING_BLOCKS = 64  # of a launch that itself waits for the host


@declared_in("ngram/ngram.cu", "NgramRows")
class _Rows(ctypes.Structure): ...


@declared_in("ngram/ngram.cu", "NgramHashing")
class _Hashing(ctypes.Structure): ...


@declared_in("ngram/ngram.cu", "NgramTokens")
class _Tokens(ctypes.Structure): ...


@declared_in("ngram/ngram.cu", "NgramRequest")
class _Request(ctypes.Structure): ...


@declared_in("ngram/ngram.cu", "NgramConv")
class _Conv(ctypes.Structure): ...


@declared_in("ngram/ngram.cu", "NgramPath")
class _Path(ctypes.Structure): ...


def ngram_ids_cuda(
    token_ids: DeviceArray, hashing: NgramHash, state: NgramState, rows: Rows, box: NgramMailbox
) -> None:
    """`Ops.ngram_ids`, into the mailbox, of which it asks the rows. Advances the tokens of the state.

    Rows of no sequence ask for row −1. ValueError if shapes disagree or no kernel has them.
    """
    context, heads = len(hashing.multipliers) - 1, len(hashing.sizes)
    if not 0 < context < MOST_TOKENS or not 0 < heads <= MOST_HEADS:
        raise ValueError(f"no kernel for n-grams of {context + 1} tokens with {heads} heads")
    _check("the state", state.tokens, "int32", (state.tokens.shape[0], context))
    _check("the mailbox", box.ids, "int32", (len(box.ids), heads))
    if len(token_ids) > len(box.ids):
        raise ValueError(f"{len(token_ids)} rows for a mailbox of {len(box.ids)}")
    numbers = _Hashing(
        num_heads=heads,
        heads_per_order=hashing.heads_per_order,
        context=context,
        end_token=hashing.end_token,
    )
    numbers.multipliers[: context + 1] = hashing.multipliers
    numbers.sizes[:heads], numbers.offsets[:heads] = hashing.sizes, hashing.offsets
    tokens = _Tokens(state=state.tokens.data_ptr(), kept=_address(state.kept_tokens))
    request = _Request(request=box.request.data_ptr(), done=box.done.data_ptr(), ids=box.ids.data_ptr())
    PROGRAM.kernel(IDS).launch(
        (1, 1, 1), IDS_THREADS, (_rows(rows, state, token_ids), numbers, tokens, request)
    )


def ngram_rows_cuda(box: NgramMailbox, out: DeviceArray, quantized: QuantActivations) -> None:
    """Waits for the rows that were asked for last, and takes them: float32 `out` [T, width], and `quantized`.

    Their blocks are decoded behind the wait. ValueError if shapes disagree.
    """
    rows, cols = out.shape
    if cols != box.width or rows > len(box.found) or cols % COLS_MULTIPLE:
        raise ValueError(f"rows {[rows, cols]} from a mailbox of {[len(box.found), box.width]}")
    if not out.is_contiguous():
        raise ValueError(f"rows {[rows, cols]} must be contiguous")
    padded, outputs = padded_cols(cols), norm_outputs(rows, cols, out, quantized)
    grid = rows, -(-padded // GROUP_SIZE // TAKE_WARPS), 1
    answer = Answer()
    if grid[0] * grid[1] <= MOST_WAITING_BLOCKS:
        answer = Answer(done=box.done.data_ptr(), late=box.done[1:].data_ptr())
    else:
        wait_answer_cuda(box.done)
    args = (box.found, box.found.shape[1], cols, padded, answer, outputs)
    kernel = ROWS_PROGRAM.kernel(instance_of(box.quant_type))
    kernel.launch(grid, TAKE_WARPS * 32, args, overlap=overlaps(rows))


def ngram_gate_cuda(key: DeviceArray, query: DeviceArray, value: DeviceArray, out: DeviceArray) -> None:
    """`Ops.ngram_gate` of contiguous float32 [T, C·E] and [T, E], into contiguous `out` [T, C·E].

    ValueError if shapes disagree, or sizes are no multiples of 4.
    """
    (rows, width), size = key.shape, value.shape[1]
    arrays = {"queries": (query, width), "values": (value, size), "the result": (out, width)}
    if width % size or size % 4:
        raise ValueError(f"{width} values of streams of {size}: whole streams, of a multiple of 4 each")
    for name, (array, cols) in {"keys": (key, width), **arrays}.items():
        _check(name, array, "float32", (rows, cols))
    num_parts = rows * width // size
    PROGRAM.kernel(GATE).launch(
        (-(-num_parts // GATE_WARPS), 1, 1),
        GATE_WARPS * 32,
        (key, query, value, out, num_parts, width // size, size),
        overlap=overlaps(rows),
    )


def ngram_conv_cuda(
    streams: DeviceArray,
    gated: DeviceArray,
    normed: DeviceArray,
    taps: DeviceArray,
    dilation: int,
    state: NgramState,
    rows: Rows,
    out: DeviceArray,
) -> None:
    """`Ops.ngram_conv` of contiguous float32 [T, width], into contiguous `out`. Advances the state.

    One launch for up to TILE_ROWS rows, else two. ValueError if shapes disagree or no kernel has them.
    """
    num_rows, width = streams.shape
    num_taps = taps.shape[1]
    history = (num_taps - 1) * dilation
    if num_taps not in TAPS or not 0 < history <= MOST_HISTORY:
        raise ValueError(f"no kernel for a convolution over {num_taps} rows {dilation} apart")
    operands = {"streams": streams, "gated rows": gated, "normed rows": normed, "the result": out}
    for name, array in operands.items():
        _check(name, array, "float32", (num_rows, width))
    _check("the kernel", taps, "float32", (width, num_taps))
    _check("the state", state.conv, "float32", (state.conv.shape[0], history, width))
    conv = _Conv(
        streams=streams.data_ptr(),
        gated=gated.data_ptr(),
        normed=normed.data_ptr(),
        taps=taps.data_ptr(),
        state=state.conv.data_ptr(),
        kept=_address(state.kept_rows),
        out=out.data_ptr(),
        width=width,
        num_taps=num_taps,
        dilation=dilation,
    )
    of_step, grid = _rows(rows, state), (-(-width // CONV_COLUMNS), -(-num_rows // TILE_ROWS), 1)
    is_alone, overlap = grid[1] == 1, overlaps(num_rows)
    PROGRAM.kernel(CONV).launch(grid, CONV_COLUMNS, (conv, of_step, int(is_alone)), overlap=overlap)
    if not is_alone:
        PROGRAM.kernel(ADVANCE).launch(grid, CONV_COLUMNS, (conv, of_step), overlap=overlap)


def ngram_commit_cuda(state: NgramState, path: CommittedPath) -> None:
    """`Ops.commit_ngram`: one launch, whatever the path. ValueError if nothing of trees is kept."""
    if state.kept_tokens is None or state.kept_rows is None:
        raise ValueError("a cache for draft trees keeps their rows")
    (_, context), (_, history, width) = state.tokens.shape, state.conv.shape
    work = _Path(
        state_id=path.state_id.data_ptr(),
        count=path.count.data_ptr(),
        kept=path.kept.data_ptr(),
        kept_tokens=state.kept_tokens.data_ptr(),
        kept_rows=state.kept_rows.data_ptr(),
        tokens=state.tokens.data_ptr(),
        conv=state.conv.data_ptr(),
        context=context,
        history=history,
        width=width,
    )
    PROGRAM.kernel(COMMIT).launch(
        (-(-(width + 1) // CONV_COLUMNS), 1, 1), CONV_COLUMNS, (work,), overlap=True
    )


def _rows(rows: Rows, state: NgramState, token_ids: DeviceArray | None = None) -> _Rows:
    batch = rows.batch
    assert batch is not None, "a step's rows lie in blocks"
    if batch.has_trees and state.kept_tokens is None:
        raise ValueError("rows of draft trees need a place to keep their inputs")
    return _Rows(
        token_ids=_address(token_ids),
        state_ids=rows.state_ids.data_ptr(),
        parents=batch.parents.data_ptr(),
        kept=batch.kept.data_ptr() if batch.has_trees else None,
        num_rows=len(rows.state_ids),
    )


def _check(name: str, array: DeviceArray, dtype: str, shape: tuple[int, ...]) -> None:
    check_array(name, array, dtype)
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(array.shape)}")


def _address(array: DeviceArray | None) -> int | None:
    return None if array is None else array.data_ptr()
