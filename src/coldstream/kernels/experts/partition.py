"""Who computes each (token, expert) pair, on the device: one launch.

A pair goes to exactly one place: *resident*, a slot in the device's memory; *streamed*, the host's memory
that the GPU reads over the bus; or the *CPU*. Which of a token's missing experts are streamed follows from
their number alone, in the order of ranks.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, ROWS_SHIFT, Mailbox
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.table import ExpertTable

PROGRAM = CudaProgram(Path(__file__).with_name("partition.cu"), ("partition_experts",))
THREADS = 1024
MAX_RANKS = 16


class Stack(ctypes.Structure):
    """As in partition.cuh."""

    _fields_ = (("slots", ctypes.c_void_p), ("mapped", ctypes.c_int64), ("step", ctypes.c_int64))


class _PairPlaces(ctypes.Structure):
    _fields_ = (("addresses", ctypes.c_void_p * MATRICES), ("cpu_ids", ctypes.c_void_p))


class _Mailbox(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("request", "done", "x", "ids", "used"))


class Prefetched(ctypes.Structure):
    """Where experts of a layer may lie that no slot holds; see prefetch.py. Without fields set, nowhere."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("data", ctypes.c_int64),
        ("place_bytes", ctypes.c_int64),
        ("offsets", ctypes.c_int64 * MATRICES),
        ("count", ctypes.c_int32),
    )


class PrefetchNotes(ctypes.Structure):
    """What prefetching has to know of a layer that is shared out; without fields set, nothing."""

    _fields_ = (
        ("emptied", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("reached", ctypes.c_void_p),
        ("tallies", ctypes.c_void_p),
    )


class Sharing(ctypes.Structure):
    """How a layer's pairs are shared out; without fields set, not at all."""

    _fields_ = (
        ("matrix", Stack * MATRICES),
        ("streamed", ctypes.c_void_p),
        ("places", _PairPlaces),
        ("box", _Mailbox),
        ("stamps", ctypes.c_void_p),
        ("request", ctypes.c_uint32),
        ("prefetched", Prefetched),
        ("notes", PrefetchNotes),
    )


@dataclass(frozen=True)
class PairPlaces:
    """Where the pairs of a step are computed, T ≤ MAX_MAILBOX_ROWS.

    addresses: int64 [3, T, K], of gate, up and down as the GPU reads them, 0 for the CPU's; cpu_ids: int32
    [T, K], the experts that the CPU computes, −1 for the others; stamps: int64 [WORDS], where the layer's
    time is kept (`stamps.py`), or None.
    """

    addresses: torch.Tensor
    cpu_ids: torch.Tensor
    stamps: torch.Tensor | None = None


def stack_of(table: ExpertTable) -> Stack:
    """One matrix of a layer's experts."""
    return Stack(table.addresses.data_ptr(), table.mapped, table.step)


def sharing_of(
    stacks: Sequence[ExpertTable],
    streamed: torch.Tensor,
    mailbox: Mailbox,
    layer: int,
    places: PairPlaces,
    prefetched: Prefetched | None = None,
    notes: PrefetchNotes | None = None,
) -> Sharing:
    """For kernels that share out a layer's pairs.

    stacks: gate, up, down of the layer, whose addresses are slots; streamed: int32 [K + 1] on the device, how
    many of n missing experts of a token are read over the bus, where they are mapped. ValueError for sizes.
    """
    _, tokens, ranks = places.addresses.shape
    if not 0 < tokens <= MAX_MAILBOX_ROWS or ranks > MAX_RANKS or len(streamed) < ranks + 1:
        raise ValueError(f"{tokens} tokens of {ranks} experts: at most {MAX_MAILBOX_ROWS} of {MAX_RANKS}")
    parts = (mailbox.request, mailbox.done, mailbox.x, mailbox.ids, mailbox.used[layer])
    return Sharing(
        (Stack * MATRICES)(*map(stack_of, stacks)),
        streamed.data_ptr(),
        _PairPlaces(
            (ctypes.c_void_p * MATRICES)(*(matrix.data_ptr() for matrix in places.addresses)),
            places.cpu_ids.data_ptr(),
        ),
        _Mailbox(*(part.data_ptr() for part in parts)),
        None if places.stamps is None else places.stamps.data_ptr(),
        (layer + 1) | tokens << ROWS_SHIFT,
        prefetched or Prefetched(),
        notes or PrefetchNotes(),
    )


def partition_experts_cuda(topk_ids: torch.Tensor, x: torch.Tensor, sharing: Sharing) -> None:
    """Shares out the pairs of int32 topk_ids [T, K] for float32 rows x [T, E].

    Writes the places that `sharing` names, asks the CPU for its pairs, and leaves the ids in the mailbox. The
    answer is there after `Mailbox.wait`. ValueError for arrays that do not fit.
    """
    tokens, ranks = topk_ids.shape
    if topk_ids.dtype != torch.int32 or not topk_ids.is_contiguous() or x.stride(1) != 1 or len(x) != tokens:
        raise ValueError("expert ids must be contiguous int32, and rows must have unit stride")
    PROGRAM.kernel("partition_experts").launch(
        (1, 1, 1),
        THREADS,
        (topk_ids, tokens, ranks, x, x.stride(0), x.shape[1], sharing),
        overlap=True,
    )
