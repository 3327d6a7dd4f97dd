"""The place where each expert of a step is computed, chosen on the device.

All pairs of an expert go to the same place: *resident*, a slot in the device's memory; *streamed*, over the
bus; or the *CPU*. `split.py` says which missing experts are streamed. The pairs of one token are shared out
by its router's launch, and streamed experts are read where the file is mapped. Those of several tokens have a
launch of their own, and `stage.py` copies streamed experts to places on the device. Rows of more than
MAX_MAILBOX_ROWS tokens are sent to the CPU by a further launch of many blocks.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstream.kernels.cuda.array import ALIGNMENT, DeviceArray, check_array
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.mailbox import ROWS_SHIFT, Mailbox
from coldstream.kernels.experts.shapes import (
    MATRICES,
    MAX_EXPERTS,
    MAX_MAILBOX_ROWS,
    MAX_RANKS,
    MAX_SHARED_ROWS,
)
from coldstream.kernels.experts.split import NUM_WORDS
from coldstream.kernels.experts.table import ExpertTable

PROGRAM = CudaProgram(Path(__file__).with_name("partition.cu"), ("partition_experts", "ask_for_experts"))
THREADS = 1024
ASK_WARPS = 8  # of a block, each with a token


@declared_in("experts/partition.cuh")
class Stack(ctypes.Structure): ...


@declared_in("experts/partition.cuh")
class _Partition(ctypes.Structure): ...


@declared_in("experts/partition.cuh", "Mailbox")
class MailboxFields(ctypes.Structure): ...


@declared_in("experts/partition.cuh")
class ExpertPlaces(ctypes.Structure):
    """Places on the device for experts of one layer. All fields 0: there are none.

    array: where they lie, which `of` keeps as long as they are.
    """

    array: DeviceArray | None = None

    @classmethod
    def of(
        cls, data: DeviceArray, stacks: Sequence[ExpertTable], most: int, place_bytes: int = 0
    ) -> "ExpertPlaces":
        """At most so many places in `data`, uint8, for gate, up and down of an expert, each of them aligned.

        place_bytes: of a place; by default what an expert takes. ValueError for an expert that takes more.
        """
        aligned = [-(-stack.matrix_bytes // ALIGNMENT) * ALIGNMENT for stack in stacks]
        place_bytes = place_bytes or sum(aligned)
        if sum(aligned) > place_bytes:
            raise ValueError(f"an expert of {sum(aligned)} bytes for places of {place_bytes}")
        offsets = (ctypes.c_int64 * MATRICES)(*(sum(aligned[:i]) for i in range(MATRICES)))
        places = cls(
            data=data.data_ptr(),
            place_bytes=place_bytes,
            offsets=offsets,
            count=min(most, data.numel() // place_bytes),
        )
        places.array = data
        return places


@declared_in("experts/partition.cuh")
class Prefetched(ctypes.Structure):
    """The places of a layer's prefetched experts, see prefetch.py. All fields 0: there are none."""


@declared_in("experts/partition.cuh", "Staging")
class StagingFields(ctypes.Structure):
    """Of `Staging`. All fields 0: none are streamed."""


@dataclass(frozen=True)
class Staging:
    """Where streamed experts are copied, see stage.py.

    chosen: int32 [1 + room.count] at least, on the device, for the number of streamed experts and their ids,
    which the launch that shares a layer out writes and the one behind it reads.
    """

    chosen: DeviceArray
    room: ExpertPlaces

    def as_c(self) -> StagingFields:
        return StagingFields(list=self.chosen.data_ptr(), room=self.room)


@declared_in("experts/partition.cuh")
class PrefetchNotes(ctypes.Structure):
    """What the kernel that shares out a layer does for prefetching. All fields 0: nothing."""


@declared_in("experts/partition.cuh")
class Hints(ctypes.Structure):
    """Which experts of a later layer the CPU should expect. All fields 0: none.

    arrays: what `hints_of` took the addresses of, and keeps as long as they are here.
    """

    arrays: tuple[object, ...] = ()


@declared_in("experts/partition.cuh")
class Sharing(ctypes.Structure):
    """How a layer's pairs are shared out. All fields 0: they are not.

    arrays: what `sharing_of` took the addresses of, and keeps as long as they are here.
    """

    arrays: tuple[object, ...] = ()


@dataclass(frozen=True)
class Partition:
    """Where the experts of a step are computed, T ≤ MAX_SHARED_ROWS.

    addresses: int64 [3, experts], of gate, up and down for the GPU, 0 for the CPU's experts, undefined for
    those that no token chose; cpu_ids: int32 [T, K], the experts that the CPU computes, −1 for the GPU's
    pairs; stamps: int64 [WORDS] for the times of the layer (`stamps.py`), or None.
    """

    addresses: DeviceArray
    cpu_ids: DeviceArray
    stamps: DeviceArray | None = None


def stack_of(table: ExpertTable) -> Stack:
    """One matrix of a layer's experts."""
    pooled = None if table.pooled is None else table.pooled.data_ptr()
    return Stack(slots=table.addresses.data_ptr(), pooled=pooled, mapped=table.mapped, step=table.step)


def mailbox_of(mailbox: Mailbox) -> MailboxFields:
    """The mailbox as kernels see it."""
    return MailboxFields(
        request=mailbox.request.data_ptr(),
        done=mailbox.done.data_ptr(),
        x=mailbox.x.data_ptr(),
        ids=mailbox.ids.data_ptr(),
    )


def sharing_of(
    stacks: Sequence[ExpertTable],
    times: DeviceArray,
    mailbox: Mailbox,
    layer: int,
    places: Partition,
    used: DeviceArray | None,
    prefetched: Prefetched | None = None,
    notes: PrefetchNotes | None = None,
    staging: Staging | None = None,
) -> Sharing:
    """The argument of kernels that share out a layer's pairs.

    stacks: gate, up, down of the layer, with the addresses of slots; times: int32 [NUM_WORDS] on the device,
    `MissTimes.words`, or 0 if the GPU reads none over the bus; used: int32 [rows, K] on the device, at least
    T rows, where all ids are noted, or None; staging: for the pairs of several tokens, of which no more
    experts are streamed than it has places. ValueError for sizes out of range.
    """
    tokens, ranks = places.cpu_ids.shape
    num_experts = len(stacks[0].addresses)
    if not 0 < tokens <= MAX_SHARED_ROWS or ranks > MAX_RANKS or num_experts > MAX_EXPERTS:
        raise ValueError(
            f"{tokens} tokens of {ranks} of {num_experts} experts: "
            f"at most {MAX_SHARED_ROWS}, {MAX_RANKS} and {MAX_EXPERTS}"
        )
    if tuple(places.addresses.shape) != (MATRICES, num_experts) or len(times) != NUM_WORDS:
        raise ValueError(f"places and times of {num_experts} experts have other shapes")
    for name, ids in (("mailbox", mailbox.ids), ("used", used)):
        if ids is not None and (len(ids) < tokens or ids.shape[1] != ranks):
            raise ValueError(f"{name}: {tokens} tokens of {ranks} ranks do not fit into {tuple(ids.shape)}")
    sharing = Sharing(
        matrix=(Stack * MATRICES)(*map(stack_of, stacks)),
        times=times.data_ptr(),
        places=_Partition(
            addresses=(ctypes.c_void_p * MATRICES)(*(matrix.data_ptr() for matrix in places.addresses)),
            cpu_ids=places.cpu_ids.data_ptr(),
        ),
        box=mailbox_of(mailbox),
        used=None if used is None else used.data_ptr(),
        stamps=None if places.stamps is None else places.stamps.data_ptr(),
        request=(layer + 1) | tokens << ROWS_SHIFT,
        staging=staging.as_c() if staging else StagingFields(),
        prefetched=prefetched or Prefetched(),
        notes=notes or PrefetchNotes(),
    )
    sharing.arrays = (*stacks, times, mailbox, places, used, staging)
    return sharing


def hints_of(
    stacks: Sequence[ExpertTable], times: DeviceArray, mailbox: Mailbox, layer: int, num_places: int = 0
) -> Hints:
    """For the router of an earlier layer, whose guess at `layer` the CPU gets; see `sharing_of`.

    num_places: for missing experts that are copied to the device meanwhile, those guessed first.
    """
    first = stack_of(stacks[0])
    hints = Hints(
        words=mailbox.ahead.data_ptr(),
        slots=first.slots,
        times=times.data_ptr(),
        mapped=first.mapped,
        layer=layer,
        num_places=num_places,
    )
    hints.arrays = (*stacks, times, mailbox)
    return hints


def begin_of(sharing: Sharing) -> Sharing:
    """For the router of several tokens, whose pairs the launch behind it shares out by `sharing`."""
    begin = Sharing(stamps=sharing.stamps)
    begin.arrays = sharing.arrays
    return begin


def partition_experts_cuda(
    topk_ids: DeviceArray, x: DeviceArray, sharing: Sharing, arrivals: DeviceArray | None = None
) -> None:
    """Shares out the pairs of int32 topk_ids [T, K] for float32 rows x [T, E].

    Writes the addresses and the ids that `sharing` names and the list of its staging, and asks the CPU for
    its pairs. arrivals: int32 [1] on the device, 0 before and after, for more than MAX_MAILBOX_ROWS tokens.
    ValueError for arrays that do not fit.
    """
    tokens, ranks = topk_ids.shape
    check_array("topk_ids", topk_ids, "int32")
    if x.stride(1) != 1 or len(x) != tokens:
        raise ValueError(f"x: {len(x)} rows of stride {x.stride(1)} for {tokens} tokens, adjacent in a row")
    if tokens > MAX_MAILBOX_ROWS and arrivals is None:
        raise ValueError(f"{tokens} tokens need an array for the arrivals of blocks")
    rows = (tokens, ranks, x, x.stride(0), x.shape[1])
    PROGRAM.kernel("partition_experts").launch((1, 1, 1), THREADS, (topk_ids, *rows, sharing), overlap=True)
    if tokens > MAX_MAILBOX_ROWS:
        PROGRAM.kernel("ask_for_experts").launch(
            (-(-tokens // ASK_WARPS), 1, 1), 32 * ASK_WARPS, (*rows, arrivals, sharing), overlap=True
        )
