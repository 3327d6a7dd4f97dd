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
from coldstream.kernels.experts.mailbox import MAX_ROWS, ROWS_SHIFT, Mailbox
from coldstream.kernels.experts.table import ExpertTable

PROGRAM = CudaProgram(Path(__file__).with_name("partition.cu"), ("partition_experts",))
THREADS = 256
MAX_RANKS = 16


class _Stack(ctypes.Structure):
    """As in partition.cu."""

    _fields_ = (("slots", ctypes.c_void_p), ("mapped", ctypes.c_int64), ("step", ctypes.c_int64))


class _Experts(ctypes.Structure):
    _fields_ = (("matrix", _Stack * 3), ("num_experts", ctypes.c_int32), ("streamed", ctypes.c_void_p))


class _Places(ctypes.Structure):
    _fields_ = (("addresses", ctypes.c_void_p * 3), ("cpu_ids", ctypes.c_void_p))


class _Mailbox(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("request", "done", "x", "ids", "used"))


@dataclass(frozen=True)
class Places:
    """Where the pairs of a step are computed, T ≤ MAX_ROWS.

    addresses: int64 [3, T, K], of gate, up and down as the GPU reads them, 0 for the CPU's; cpu_ids: int32
    [T, K], the experts that the CPU computes, −1 for the others.
    """

    addresses: torch.Tensor
    cpu_ids: torch.Tensor


def partition_experts_cuda(
    topk_ids: torch.Tensor,
    stacks: Sequence[ExpertTable],
    streamed: torch.Tensor,
    x: torch.Tensor,
    mailbox: Mailbox,
    layer: int,
    places: Places,
    counters: torch.Tensor,
) -> None:
    """Writes `places` for int32 topk_ids [T, K], and asks the CPU for its pairs of float32 x [T, E].

    The ids are left in `mailbox.used[layer]`.

    stacks: gate, up, down of a layer, whose addresses are slots; streamed: int32 [K + 1] on the device, how
    many of n missing experts of a token are read over the bus, where they are mapped; counters: int32 [2],
    zero before and after. The CPU's answer is there after `mailbox.wait()`. ValueError for sizes.
    """
    tokens, ranks = topk_ids.shape
    if not 0 < tokens <= MAX_ROWS or ranks > MAX_RANKS or x.shape != (tokens, mailbox.x.shape[1]):
        raise ValueError(
            f"a mailbox of {tuple(mailbox.x.shape)} for rows {tuple(x.shape)} of {ranks} experts"
        )
    if topk_ids.dtype != torch.int32 or not topk_ids.is_contiguous() or x.stride(1) != 1:
        raise ValueError("expert ids must be contiguous int32, and rows must have unit stride")
    if tuple(places.addresses.shape) != (3, tokens, ranks) or len(streamed) < ranks + 1:
        raise ValueError(f"places {tuple(places.addresses.shape)} for {tokens} tokens of {ranks} experts")
    experts = _Experts(
        (_Stack * 3)(*(_Stack(t.addresses.data_ptr(), t.mapped, t.step) for t in stacks)),
        len(stacks[0].addresses),
        streamed.data_ptr(),
    )
    to = _Places(
        (ctypes.c_void_p * 3)(*(matrix.data_ptr() for matrix in places.addresses)),
        places.cpu_ids.data_ptr(),
    )
    parts = (mailbox.request, mailbox.done, mailbox.x, mailbox.ids, mailbox.used[layer])
    box = _Mailbox(*(part.data_ptr() for part in parts))
    request = (layer + 1) | tokens << ROWS_SHIFT
    PROGRAM.kernel("partition_experts").launch(
        (tokens, 1, 1),
        THREADS,
        (topk_ids, ranks, experts, to, x, x.stride(0), x.shape[1], box, request, counters),
        overlap=True,
    )
