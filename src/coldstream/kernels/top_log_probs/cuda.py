"""The likeliest tokens after rows of logits, in CUDA C++: for drafts, whose bits no text depends on."""

import ctypes
from pathlib import Path

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.sample.cuda import BLOCK_TOKENS, THREADS, Logits

SMALL_RANKS, MAX_RANKS = RANKS = (4, 16)  # the most of each instance
PROGRAM = CudaProgram(
    Path(__file__).with_name("top_log_probs.cu"), tuple(f"top_log_probs<{most}>" for most in RANKS)
)


@declared_in("top_log_probs/top_log_probs.cu", f"TopPart<{SMALL_RANKS}>")
class _SmallPart(ctypes.Structure): ...


@declared_in("top_log_probs/top_log_probs.cu", f"TopPart<{MAX_RANKS}>")
class _LargePart(ctypes.Structure): ...


PARTS = {SMALL_RANKS: _SmallPart, MAX_RANKS: _LargePart}


def most_ranks(ranks: int) -> int:
    """Of the instance that finds so many."""
    return SMALL_RANKS if ranks <= SMALL_RANKS else MAX_RANKS


def num_parts(vocab: int) -> int:
    """Blocks, and so parts, of a row."""
    return -(-vocab // BLOCK_TOKENS)


def workspace_bytes(num_rows: int, vocab: int, ranks: int) -> int:
    """Of the parts of all rows."""
    return num_rows * num_parts(vocab) * ctypes.sizeof(PARTS[most_ranks(ranks)])


def top_log_probs_cuda(
    logits: DeviceArray,
    parts: DeviceArray,
    arrivals: DeviceArray,
    ids: DeviceArray,
    log_probs: DeviceArray,
) -> None:
    """Writes the greatest logits of each row of float32 [T, V] into int32 ids and float32 log_probs [T, k].

    The greatest first, of equal ones the lowest id; log_probs are those of a softmax over the row, NaN unless
    all its logits are finite. parts: uint8 [workspace_bytes]; arrivals: int32 [T], zero before and after.
    ValueError unless 1 ≤ k ≤ MAX_RANKS and k ≤ V.
    """
    (rows, vocab), ranks = logits.shape, ids.shape[1]
    if not 1 <= ranks <= min(MAX_RANKS, vocab) or ids.shape != log_probs.shape or len(ids) != rows:
        raise ValueError(f"{tuple(ids.shape)} of the likeliest tokens of logits {(rows, vocab)}")
    if parts.numel() < workspace_bytes(rows, vocab, ranks) or len(arrivals) < rows:
        raise ValueError(f"{parts.numel()} bytes of workspace for logits {(rows, vocab)}")
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 4 == 0
    source = Logits(first=logits.data_ptr(), row_stride=logits.stride(0), vocab=vocab, aligned=aligned)
    args = (source, ranks, parts, arrivals, ids, log_probs)
    instance = f"top_log_probs<{most_ranks(ranks)}>"
    PROGRAM.kernel(instance).launch((num_parts(vocab), rows, 1), THREADS, args)
