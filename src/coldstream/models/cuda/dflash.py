"""Drafts by a DFlash drafter beside a model on a GPU: one captured graph each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from coldstream import kvcache
from coldstream.errors import ColdstreamError, OutOfMemoryError
from coldstream.kernels.cuda.array import ELEMENT_BYTES, DeviceArray, RawArray, as_type
from coldstream.kernels.cuda.contents import copy_parts, joined, write
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.kernel_loading import KernelLoading
from coldstream.kernels.cuda.memory import DeviceMemory, own_bytes
from coldstream.kernels.cuda.runtime import copies, streams
from coldstream.kernels.cuda.staged import ReadBack, StagedRing
from coldstream.kernels.draft_block.cuda import CONTEXT_TYPE, NO_ROW, choose_chain_cuda, forget_rows_cuda
from coldstream.kernels.fused.cuda import FusedArrays, FusedKernels
from coldstream.kernels.fused.reference import FusedText
from coldstream.models.cuda.dflash_block import (
    COUNT,
    FIRST,
    LENGTH,
    MOST_WAITING,
    ROOT,
    BlockMemory,
    DflashBlock,
    DraftTarget,
    kernels_of,
)
from coldstream.models.cuda.features import FEATURE_TYPE, Features
from coldstream.models.cuda.fused_draft import CudaFusedRun, CudaFusedSteps, FusedShape
from coldstream.models.cuda.graphs import CapturedSteps, Key
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.dflash.context import CommittedRows
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import FIRST_CONTEXT_ROWS, DflashSpec, DraftLattice

# Rows of captured steps that append committed rows. Shorter ones leave the last rows out: the host would take
# longer to launch an exact number of them, kernel by kernel.
APPENDED_ROWS = (8, 16, 32, MOST_WAITING)


class RowSpans:
    """Which positions there are rows of, where only the last `capacity` ones are kept."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # ascending, neither empty nor adjacent

    @property
    def last(self) -> int:
        """−1 if there are none."""
        return self._spans[-1][1] - 1 if self._spans else -1

    def append(self, first: int, count: int, capacity: int) -> None:
        """At least one row, behind the last one."""
        assert first > self.last
        end = first + count
        if self._spans and self._spans[-1][1] == first:
            first = self._spans.pop()[0]
        self._spans.append((first, end))
        oldest = self.last + 1 - capacity
        self._spans = [(max(begin, oldest), end) for begin, end in self._spans if end > oldest]

    def truncate(self, length: int) -> None:
        """Forgets the rows from position `length` on."""
        self._spans = [(begin, min(end, length)) for begin, end in self._spans if begin < length]


class DflashRings:
    """The committed rows of one sequence: keys and values of all layers. No memory before `make_room`.

    Each layer has a ring with the row at position p in place p modulo its capacity. It also has the positions
    of its rows. Kernels compare positions, so they need not know which rows are missing. A layer with a
    window keeps the window's rows. A layer without one keeps all rows.

    table: `CONTEXT_TYPE` entries by layer, uint8 on the device. It is another array whenever memory has
    changed.
    """

    def __init__(self, spec: DflashSpec) -> None:
        self._spec = spec
        self.close()

    def close(self) -> None:
        """Forgets all rows and frees their memory."""
        spec = self._spec
        self._room = 0  # positions that fit, however many of them a window keeps
        self._capacities: list[int] = []
        self._rows = RawArray(0, (0, spec.num_kv_heads, spec.head_dim), FEATURE_TYPE)
        self._positions = RawArray(0, (0,), "int32")
        self._spans = RowSpans()
        self.table = RawArray(0, (0,), "uint8")

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return self._rows.nbytes

    @property
    def last_position(self) -> int:
        """Of the last row, −1 if there are none."""
        return self._spans.last

    def make_room(self, length: int) -> None:
        """For rows up to position `length`. Raises OutOfMemoryError, with nothing changed."""
        if length <= self._room:
            return
        spec, room = self._spec, max(FIRST_CONTEXT_ROWS, 2 * self._room, length)
        capacities = [room if layer.window is None else min(room, layer.window) for layer in spec.layers]
        if capacities == self._capacities:
            self._room = room
            return
        ends = np.cumsum([0, *capacities])
        shape = (2 * int(ends[-1]), spec.num_kv_heads, spec.head_dim)
        # Blocks, which go with a wait for the device: the pool would otherwise hold more than it keeps, and
        # would keep something when a model is closed.
        rows = as_type(own_bytes(prod(shape) * ELEMENT_BYTES[FEATURE_TYPE]), FEATURE_TYPE).reshape(*shape)
        positions = as_type(own_bytes(int(ends[-1]) * ELEMENT_BYTES["int32"]), "int32")
        on_device = own_bytes(table_bytes(spec))
        copies.fill_words(positions.data_ptr(), NO_ROW, len(positions))
        table = np.zeros(len(capacities), CONTEXT_TYPE)
        old = 0
        for layer, (first, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
            parts = (rows[2 * first : first + end], rows[first + end : 2 * end], positions[first:end])
            if self._capacities:
                # They keep their places: a ring that has wrapped around does not grow.
                count = self._capacities[layer]
                keys = self._rows[2 * old : 2 * old + count]
                values = self._rows[2 * old + count : 2 * (old + count)]
                for target, source in zip(
                    parts, (keys, values, self._positions[old : old + count]), strict=True
                ):
                    copy_parts([source], target[:count])
                old += count
            table[layer] = (*(part.data_ptr() for part in parts), capacities[layer])
        write(on_device, table.view(np.uint8))
        self._rows, self._positions, self.table = rows, positions, on_device
        self._room, self._capacities = room, capacities

    def appended(self, first: int, count: int) -> None:
        """So many rows from position `first` on have been put there, behind the last one."""
        if count:
            self._spans.append(first, count, min(self._capacities))

    def truncate(self, length: int) -> None:
        """Forgets the rows from position `length` on."""
        if self._spans.last < length:
            return
        self._spans.truncate(length)
        forget_rows_cuda(self._positions, length)


class CudaDflash:
    """The drafter of a runner, whose memory and captured steps it uses.

    begin, make_room: as `CudaMtp` has them.
    """

    def __init__(
        self,
        loaded: Loaded,
        file: DflashFile,
        steps: CapturedSteps,
        begin: Callable[[], None],
        make_room: Callable[[], bool],
    ) -> None:
        """The file may be closed afterwards. Raises ModelChangedError if the file shrank, OutOfMemoryError,
        DeviceError.
        """
        self._loaded, self._steps = loaded, steps
        self._begin, self._make_room = begin, make_room
        self._contexts = WeakSet[DflashRings]()  # of all sequences
        target, sizes = DraftTarget.of(loaded), BlockMemory.of(file)
        with device_errors(), room_for("loading a drafter"):
            with KernelLoading.beside(kernels_of(file, target)):
                self._memory = DeviceMemory(sizes.persistent, sizes.workspace)
                self.block = DflashBlock.load(file, self._memory, target)
            self._staged, self._found = StagedRing(self.block.places), ReadBack(self.block.found)
        self._table: RawArray | None = None  # of the contexts that the block reads
        self.fused = None
        if loaded.fused is not None and loaded.features is not None:
            block = DflashFusedDrafter(self.block, loaded.features)
            self.fused = CudaFusedSteps(loaded, block, steps, begin, make_room)

    def close(self) -> None:
        """Frees the device's memory once it is idle, that of all contexts too. Not to be used afterwards."""
        for rings in self._contexts:
            rings.close()
        self._table = None
        self._memory.close()

    def new_sequence(self) -> "CudaDflashSequence":
        """An empty sequence. It takes no memory before its first row."""
        rings = DflashRings(self.block.spec)
        self._contexts.add(rings)
        return CudaDflashSequence(self, rings)

    def use(self, rings: DflashRings) -> None:
        """Makes the block read these contexts, with what is queued from now on."""
        if self._table is not rings.table:
            copy_parts([rings.table], self.block.contexts)
            self._table = rings.table

    def draft(self, rings: DflashRings, length: int, root: int, num_rows: int) -> tuple[Any, Any]:
        """Candidates of num_rows − 1 positions and their log-probabilities, on the host until the next draft.

        Raises DeviceError, OutOfMemoryError.
        """
        with device_errors():
            self.use(rings)
            self._stage(length, root)
            step = partial(self.block.draft, num_rows, self._place(ROOT), self._place(LENGTH))
            self._begin()
            self._run(("dflash", (self, num_rows)), step)
            found = self._found.copy()
            streams.current_stream().synchronize()
        count, ids = num_rows - 1, self.block.candidate_ids
        log_probs = found[ids.numel() :].view(np.float32).reshape(self.block.log_probs.shape)
        return found[: ids.numel()].reshape(ids.shape)[:count], log_probs[:count]

    def append(self, rings: DflashRings, parts: Sequence[DeviceArray], first: int) -> None:
        """Queues keys and values of committed rows from position `first` on, at most MOST_WAITING.

        parts: their features, `FEATURE_TYPE` [n, feature_size] each. Only memory of the drafter is written:
        logits of the model's last step may still be read. Raises DeviceError, OutOfMemoryError.
        """
        self.use(rings)
        count = sum(map(len, parts))
        copy_parts(parts, self.block.waiting[:count])
        self._stage(0, 0, first, count)
        num_rows = next(rows for rows in APPENDED_ROWS if rows >= count)
        places = self._place(FIRST), self._place(COUNT)
        step = partial(self.block.append, self.block.waiting[:num_rows], self.block.contexts, *places)
        self._run(("dflash rows", (self, num_rows)), step)

    def _stage(self, *values: int) -> None:
        """Queues the transfer of the first places."""
        self._staged.next_on_host()[: len(values)] = values
        self._staged.copy(len(values))

    def _place(self, index: int) -> DeviceArray:
        """int32 [1] on the device."""
        return self._staged.values[index : index + 1]

    def _run(self, key: Key, step: Callable[[], None]) -> None:
        self._steps.run(key, step, lambda nothing: nothing, self._make_room)


class CudaDflashSequence(CommittedRows[DflashRings]):
    """The context of one sequence. Raises OutOfMemoryError, GenerationFault and DeviceError."""

    def __init__(self, drafting: "CudaDflash", rings: DflashRings) -> None:
        """rings: empty ones."""
        super().__init__((rings,), MOST_WAITING)
        self._drafting, self._rings = drafting, rings

    @property
    def spec(self) -> DflashSpec:
        return self._drafting.block.spec

    def _copied(self, features: DeviceArray) -> DeviceArray:
        """features: of FEATURE_TYPE, on the device."""
        with device_errors(), room_for("the context of a drafter"):
            return joined([features])

    def _joined(self, parts: list[DeviceArray]) -> DeviceArray:
        if len(parts) == 1:
            return parts[0]
        with device_errors(), room_for("the context of a drafter"):
            return joined(parts)

    def _compute(self, parts: list[DeviceArray], positions: NDArray[np.int64]) -> None:
        first, count = int(positions[0]), len(positions)
        with device_errors(), room_for("the context of a drafter"):
            self._rings.make_room(first + count)
            if count <= MOST_WAITING:
                self._drafting.append(self._rings, parts, first)
            else:
                self._drafting.block.append(self._joined(parts), self._rings.table, first)
        self._rings.appended(first, count)

    @property
    def has_fused_steps(self) -> bool:
        """Whether there are fused steps: if all of the model's experts are on the device."""
        return self._drafting.fused is not None

    def begin_fused(self, sequence: kvcache.Sequence, text: FusedText) -> CudaFusedRun | None:
        """Fused steps of a text of which all rows but the root's are here; see `CudaFusedSteps.start`.

        The rows that they keep are here afterwards. None too if rows that wait cannot be computed. Those are
        missing then.
        """
        fused = self._drafting.fused
        if fused is None or sequence.length != self.length:
            return None
        try:
            self._compute_waiting()
        except ColdstreamError:
            return None
        return fused.start(sequence, DflashFusedRows(self), text)

    def make_room(self, length: int) -> None:
        """For rows up to position `length`."""
        with room_for("the context of a drafter"):
            self._rings.make_room(length)

    def use(self) -> None:
        """See `CudaDflash.use`."""
        self._drafting.use(self._rings)

    def computed(self, num_rows: int) -> None:
        """So many rows have been put behind the last one, none of which waits."""
        self._rings.appended(self.length, num_rows)
        self.length += num_rows

    def draft(self, anchor: int, num_rows: int, num_candidates: int) -> DraftLattice:
        """See `CpuDflashSequence.draft`; the first kind has at most MAX_CANDIDATES. Raises as the class."""
        assert 2 <= num_rows <= self.spec.block_size, "a block has an anchor and masks"
        self._compute_waiting()
        with room_for("a draft"):
            found = self._drafting.draft(self._rings, self.length, anchor, num_rows)
        token_ids, log_probs = found[0].astype(np.int64), found[1].astype(np.float64)
        if self.spec.second is None:
            return DraftLattice(token_ids[:, :num_candidates], log_probs[:, :num_candidates])
        return DraftLattice(token_ids, log_probs)


class DflashFusedDrafter:
    """Implements `CudaFusedDrafter`: the likeliest chain of the candidates of a block."""

    candidate = None  # a draft is whole at once

    def __init__(self, block: DflashBlock, features: Features) -> None:
        """features: of the model's last step."""
        self._block, self._features = block, features

    @property
    def most_nodes(self) -> int:
        """See `CudaFusedDrafter`."""
        return self._block.spec.block_size - 1

    def draft(self, kernels: FusedKernels, arrays: FusedArrays, shape: FusedShape) -> None:
        """See `CudaFusedDrafter`."""
        block, num_nodes = self._block, shape.num_rows - 1
        num_rows = block.spec.rows_of_draft(num_nodes, block.spec.block_size)
        block.draft(num_rows, arrays.root, arrays.length)
        choose_chain_cuda(
            block.candidate_ids[: num_rows - 1],
            block.log_probs[: num_rows - 1],
            arrays.model_columns[1 : 1 + num_nodes],
        )

    def follow(self, arrays: FusedArrays, shape: FusedShape) -> None:
        """See `CudaFusedDrafter`."""
        features = self._features.of(slice(shape.num_rows))
        self._block.append(features, self._block.contexts, arrays.first, arrays.count)

    def state_of(self, row: int) -> DeviceArray | None:
        """See `CudaFusedDrafter`: none is wanted."""


class DflashFusedRows:
    """Implements `FusedRows`: the context of a sequence, which has all of its rows."""

    state_id = 0  # the block finds its rows otherwise

    def __init__(self, sequence: "CudaDflashSequence") -> None:
        self._sequence = sequence

    @property
    def length(self) -> int:
        """See `FusedRows`."""
        return self._sequence.length

    def reserve(self, num_rows: int) -> None:
        """See `FusedRows`."""
        self.lengthen(num_rows)

    def lengthen(self, num_rows: int) -> bool:
        """See `FusedRows`. The table that fused steps read is exchanged behind those in flight."""
        self._sequence.make_room(self.length + num_rows)
        self._sequence.use()
        return False

    def write_table(self, table: Any) -> None:
        """See `FusedRows`: there is nothing to write."""

    def keep(self, num_rows: int) -> None:
        """See `FusedRows`."""
        self._sequence.computed(num_rows)

    @contextmanager
    def whole_or_cleared(self) -> Iterator[None]:
        """See `FusedRows`."""
        try:
            yield
        except BaseException:
            self._sequence.truncate(0)
            raise


def table_bytes(spec: DflashSpec) -> int:
    """Bytes of a table of contexts."""
    return spec.num_layers * CONTEXT_TYPE.itemsize


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Inside, errors of memory name what it was for, and how to do without."""
    try:
        yield
    except (OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(
            f"no memory for {what}: choose a smaller --ctx-size, or draft in another way"
        ) from error
