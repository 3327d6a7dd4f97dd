"""Experts on the host, and the CPU's threads that compute them.

The file is mapped whole, and the GPU reads it over the bus; or some experts are in a pool in RAM, and the
others on the disk.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol

import numpy as np

from coldstream.experts.file_lock import FileLock, register, unlock
from coldstream.experts.ram_pool import RamPool
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import CpuOps, expert_glu
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.cuda.runtime import allocations, streams
from coldstream.kernels.experts.mailbox import ROWS_SHIFT, Mailbox
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import SWIGLU, Activation, ExpertBiases
from coldstream.placement.hardware import usable_cpus
from coldstream.placement.limits import Limits, lock_advice

# How long threads poll between a prompt's requests. The GPU takes 2 to 3 ms from an answer to the next one.
# Where the bus takes longer, threads sleep meanwhile.
AWAKE_S: Final = 0.003


class CardServer(Protocol):
    """A further card that answers a mailbox, see `card_experts.py`."""

    def begin_step(self, rows: int) -> None:
        """Has it answer a step of so many rows, which is launched behind this."""

    def give_up(self) -> None:
        """Has it end a step that was not launched as a whole. The first card has nothing to do."""

    def check(self) -> None:
        """Raises GenerationFault if an answer was undefined."""

    def close(self) -> None:
        """Call last."""


class HostExperts:
    """The experts of one model, and threads that compute them when a mailbox asks.

    `mailbox` is for decode steps, in which the GPU asks. `bulk` is for up to `max_rows` rows of a prefill, in
    which the host asks. wanted_ids: int32 [chunk_size, K], the expert ids of a prefill step; guessed_ids:
    int32 [max_rows, K], those that the next layer will probably choose. pool: None if the file is mapped.
    is_served_by_card: whether `use_card` will be called, and the CPU answers `bulk` alone.
    """

    def __init__(
        self,
        threads: int,
        mailbox: Mailbox,
        bulk: Mailbox,
        chunk_size: int,
        pool: RamPool | None = None,
        *,
        is_served_by_card: bool = False,
    ) -> None:
        self.ops = CpuOps(threads)
        self.mailbox, self.bulk, self.pool = mailbox, bulk, pool
        self._num_active = threads
        self._is_launching = False  # a step in which the GPU asks
        self._card: CardServer | None = None
        self._of_cpu = mailbox
        if is_served_by_card:  # one that nobody asks
            self._of_cpu = Mailbox.planned(mailbox.ids.shape[1], mailbox.x.shape[1], 1)
        ahead = self._of_cpu.ahead.numpy().view(np.uint32)
        self.server = _csrc.ExpertServer(self.ops.runtime, *self._of_cpu.arrays(), ahead=ahead)
        self.bulk_server = _csrc.ExpertServer(self.ops.runtime, *bulk.arrays(), is_prefill=True)
        if threads < usable_cpus():  # one is left for the thread that launches
            self.bulk_server.awake_s = AWAKE_S
        self.bulk_request, self.bulk_done = bulk.arrays()[:2]
        self.max_rows = len(bulk.x)
        ranks = bulk.ids.shape[1]
        self.wanted_ids = allocations.page_locked((chunk_size, ranks), "int32")
        self.guessed_ids = allocations.page_locked((self.max_rows, ranks), "int32")
        self._registered: dict[int, RegisteredMemory | None] = {}
        self._begun: dict[int, Future[RegisteredMemory | None]] = {}  # by address, until they are asked for
        self._lock: FileLock | None = None  # of what is in `_begun`
        self._places: dict[int, tuple[GGUFFile, int, int]] = {}  # address → file, shard, bytes

    def use_card(self, card: CardServer) -> None:
        """From now on a further card answers `mailbox`, and not the CPU."""
        self._card = card

    def begin_step(self, rows: int) -> None:
        """Call right before the launch of a step of so many rows in which the GPU asks, and `step_launched`
        behind it.
        """
        if self._card is None:
            self.server.begin()
        if self._is_launching:
            self._restore_mailbox()
        if self._card is not None:
            self._card.begin_step(rows)
        self._is_launching = True

    def step_launched(self) -> None:
        """Call right after the launch of a step."""
        self._is_launching = False

    def _restore_mailbox(self) -> None:
        """After a launch that failed on its way: nothing may have read what the CPU wrote for it."""
        streams.current_stream().synchronize()
        if self._card is not None:
            self._card.give_up()
        while not self.mailbox.done.numpy()[0]:
            time.sleep(1e-4)
        self.mailbox.mark_unwritten()

    def use_threads(self, count: int | None) -> None:
        """How many threads compute from now on, while the others sleep; None: all."""
        wanted = count or self.ops.threads
        if self._num_active != wanted:
            self._num_active = wanted
            self.ops.runtime.active_threads = wanted

    def use_lock(self, file: GGUFFile, shards: Collection[int], lock: FileLock) -> None:
        """Takes these parts of a file over from their lock, on which `device_address` waits."""
        self._lock = lock
        for shard in shards:
            mapped, begun = lock.take(shard)
            self.ops.use_map(file, shard, mapped)
            self._begun[mapped.address] = begun

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> tuple[Any, int]:
        """A stack of experts, and the address at which it is mapped.

        With a pool the mapping is never read: its addresses name places in the file.
        """
        weight = self.ops.map_weight(file, info)
        mapped = self.ops.mapped_file(file, info.shard)
        self._places[mapped.address] = (file, info.shard, mapped.size)
        if self.pool is not None:
            return self.pool.weight(info, weight.address), weight.address
        return weight, weight.address

    def device_address(self, address: int, num_bytes: int) -> int:
        """Where the device reads the bytes that are mapped from `address` on; 0 if it cannot read them all.
        Waits for the registration, which it begins if nobody has.

        ValueError for an address of no model's file. Raises as `RegisteredMemory.register`.
        """
        if self.pool is not None:
            return 0
        begin, (file, shard, _) = self._place_of(address)
        if begin not in self._registered:
            if (begun := self._begun.pop(begin, None)) is not None:
                assert self._lock is not None, "what has begun is of a lock"
                self._lock.begin()
                self._registered[begin] = begun.result()
            else:
                mapped = self.ops.mapped_file(file, shard)
                self._registered[begin] = register(file.descriptor(shard), mapped)
        registered = self._registered[begin]
        if registered is None or not registered.covers(address, num_bytes):
            return 0
        return address + registered.offset

    def is_locked_at(self, address: int, num_bytes: int) -> bool:
        """Whether the copy engine alone copies these mapped bytes; assumed until `device_address` was asked.

        ValueError for an address of no model's file.
        """
        begin, _ = self._place_of(address)
        registered = self._registered.get(begin)
        if begin not in self._registered:
            return True
        return registered is not None and registered.covers(address, num_bytes)

    @property
    def could_lock_all(self) -> bool:
        """Whether all that was to be locked so far is."""
        return all(each is not None and each.is_whole for each in self._registered.values())

    @property
    def is_locked(self) -> bool:
        """Whether `device_address` returns at once, with whatever has come of locking the file."""
        return all(begun.done() for begun in self._begun.values())

    @property
    def lock_problem(self) -> str | None:
        """What could not be page-locked, what follows, and what helps; None if all that was tried could."""
        if self.pool is not None:
            if self.pool.is_locked:
                return None
            return (
                f"{self.pool.num_bytes / 2**30:.1f} GiB of RAM for experts could not be page-locked, or only "
                f"in part, so they come to the GPU more slowly: {lock_advice(Limits.read())}"
            )
        if self.could_lock_all:
            return None
        wanted, locked = self.locked_bytes
        return (
            f"{locked / 2**30:.1f} of {wanted / 2**30:.1f} GiB of the file could be page-locked; the CPU "
            f"computes the experts in the rest that the GPU lacks: {lock_advice(Limits.read())}"
        )

    @property
    def locked_bytes(self) -> tuple[int, int]:
        """Bytes that were to be page-locked so far, and those of them that are."""
        if self.pool is not None:
            return self.pool.num_bytes, self.pool.locked_bytes
        wanted = locked = 0
        for begin, registered in self._registered.items():
            size = self._places[begin][2]
            wanted += size
            if registered is not None:
                locked += size if registered.is_whole else min(size, registered.part_bytes)
        return wanted, locked

    @property
    def is_readable(self) -> bool:
        """Whether the device can read all mapped experts."""
        return self.pool is None and self.could_lock_all

    def locate(self, address: int) -> tuple[GGUFFile, int, int]:
        """The file, shard and offset in it that are mapped at `address`. ValueError if none is."""
        begin, (file, shard, _) = self._place_of(address)
        return file, shard, address - begin

    def _place_of(self, address: int) -> tuple[int, tuple[GGUFFile, int, int]]:
        """Where the part of a file begins that is mapped at `address`, and which part it is."""
        for begin, place in self._places.items():
            if begin <= address < begin + place[2]:
                return begin, place
        raise ValueError(f"no model file is mapped at {address:#x}")

    def add_layer(
        self,
        stacks: Sequence[ExpertTable],
        activation: Activation = SWIGLU,
        biases: ExpertBiases | None = None,
    ) -> int:
        """Adds the next layer's gate, up and down. Returns its number in requests."""
        gate, up, down = (stack.host for stack in stacks)
        pool = None
        if self.pool is not None:
            self.pool.add_layer(stacks)
            pool = self.pool.stacks.pool
        glu = expert_glu(activation, biases)
        self.bulk_server.add_layer(gate, up, down, pool, glu)
        layer: int = self.server.add_layer(gate, up, down, pool, glu)
        return layer

    def hold(self, layer: int, experts: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
        """Keeps those of `experts` that are in a pool there until `release`. Their addresses, by matrix."""
        if self.pool is None:
            return {}
        found = {expert: self.pool.hold(layer, expert) for expert in experts}
        return {expert: addresses for expert, addresses in found.items() if addresses is not None}

    def release(self, layer: int, experts: Iterable[int]) -> None:
        """Ends one `hold` of these experts."""
        for expert in experts:
            assert self.pool is not None, "what is held is in a pool"
            self.pool.release(layer, expert)

    @property
    def bulk_seconds(self) -> float:
        """How long the CPU has worked for `bulk` so far."""
        return float(sum(seconds for _, _, seconds in self.bulk_server.work()))

    def choose_bulk(self, ids: "np.ndarray[Any, Any]", experts: Sequence[int], num_experts: int) -> None:
        """Notes which pairs of int32 ids [T, K] the CPU computes: those of `experts`, of a layer's so many.

        No request of `bulk` may be unanswered, and nothing may read its ids.
        """
        by_id = np.full(num_experts, -1, np.int32)
        by_id[experts] = experts
        # Clipped, so that it writes the result in place; no id is out of range.
        by_id.take(ids, out=self.bulk.ids[: len(ids)].numpy(), mode="clip")

    def ask_bulk(self, layer: int, rows: int) -> None:
        """Has the CPU compute the pairs that were chosen last, of so many rows in `bulk.x`.

        `bulk.done` is set when `bulk.out` is complete.
        """
        self.bulk_done[0] = 0
        self.bulk_request[0] = (layer + 1) | rows << ROWS_SHIFT

    def check_card(self) -> None:
        """Raises GenerationFault if an answer of the further card was undefined."""
        if self._card is not None:
            self._card.check()

    def close(self) -> None:
        """Ends the threads and unregisters the file. The device must no longer read from it."""
        if self._card is not None:
            self._card.close()
        self.server.end()
        self.bulk_server.end()
        if self._lock is not None:
            self._lock.give_up()
        for begun in self._begun.values():
            unlock(begun)
        self._begun.clear()
        for registered in self._registered.values():
            if registered is not None:
                registered.close()
        self._registered.clear()
        if self.pool is not None:
            self.pool.close()
