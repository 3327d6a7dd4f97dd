"""Experts in the host's memory: a mapped file that the GPU reads over the bus, and CPU threads."""

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.experts.mailbox import ROWS_SHIFT, Mailbox
from coldstream.kernels.experts.table import ExpertTable


class HostExperts:
    """The experts of one model, and threads that compute them when a mailbox asks.

    `mailbox` serves the few rows of a captured step, whose requests the GPU makes; `bulk` serves up to
    `max_rows` rows of a prompt, whose requests the host makes. wanted_ids: int32 [chunk_size, K], the expert
    ids of a prompt's step.
    """

    def __init__(self, threads: int, mailbox: Mailbox, bulk: Mailbox, chunk_size: int) -> None:
        self.ops = CpuOps(threads)
        self.mailbox, self.bulk = mailbox, bulk
        self.server = _csrc.ExpertServer(self.ops.runtime, *mailbox.arrays())
        self.bulk_server = _csrc.ExpertServer(self.ops.runtime, *bulk.arrays())
        self.bulk_request, self.bulk_done = bulk.arrays()[:2]
        self.max_rows = len(bulk.x)
        ranks = bulk.ids.shape[1]
        self.wanted_ids = torch.zeros((chunk_size, ranks), dtype=torch.int32, pin_memory=True)
        self._registered: dict[int, RegisteredMemory | None] = {}
        self._places: dict[int, tuple[GGUFFile, int, int]] = {}  # address → file, shard, bytes

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> tuple[Any, int, int]:
        """A mapped stack of experts, its address, and that for the device, 0 if the device cannot read it."""
        weight = self.ops.map_weight(file, info)
        mapped = self.ops.mapped_file(file, info.shard)
        if mapped.address not in self._registered:
            if mapped.size < os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
                # Registering locks the pages, and would read them from the disk one by one.
                mapped.read_ahead(0, mapped.size)
            self._registered[mapped.address] = RegisteredMemory.register(mapped.address, mapped.size)
            self._places[mapped.address] = (file, info.shard, mapped.size)
        registered = self._registered[mapped.address]
        return weight, weight.address, 0 if registered is None else weight.address + registered.offset

    @property
    def is_readable(self) -> bool:
        """Whether the device can read all mapped experts."""
        return all(registered is not None for registered in self._registered.values())

    def locate(self, address: int) -> tuple[GGUFFile, int, int]:
        """The file, shard and offset in it that are mapped at `address`. ValueError if none is."""
        for begin, (file, shard, size) in self._places.items():
            if begin <= address < begin + size:
                return file, shard, address - begin
        raise ValueError(f"no model file is mapped at {address:#x}")

    def add_layer(self, stacks: Sequence[ExpertTable]) -> int:
        """Adds the next layer's gate, up and down; its number in requests."""
        gate, up, down = (stack.host for stack in stacks)
        self.bulk_server.add_layer(gate, up, down)
        layer: int = self.server.add_layer(gate, up, down)
        return layer

    @property
    def bulk_seconds(self) -> float:
        """How long the CPU has worked for `bulk` so far."""
        return float(sum(seconds for _, _, seconds in self.bulk_server.work()))

    def ask_bulk(self, layer: int, ids: "np.ndarray[Any, Any]", experts: Sequence[int]) -> None:
        """Has the CPU compute the pairs of `experts` in int32 ids [T, K], of the rows in `bulk.x`.

        No other request of `bulk` may be unanswered. `bulk.done` is set when `bulk.out` is complete.
        """
        mine = np.zeros(int(ids.max(initial=0)) + 1, bool)
        mine[[expert for expert in experts if expert < len(mine)]] = True
        self.bulk.ids[: len(ids)].numpy()[:] = np.where(mine[ids], ids, -1)
        self.bulk_done[0] = 0
        self.bulk_request[0] = (layer + 1) | len(ids) << ROWS_SHIFT

    def close(self) -> None:
        """Ends the threads and unregisters the file. The device must no longer read from it."""
        self.server.end()
        self.bulk_server.end()
        for registered in self._registered.values():
            if registered is not None:
                registered.close()
        self._registered.clear()
