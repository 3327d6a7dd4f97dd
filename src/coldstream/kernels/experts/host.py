"""Experts in the host's memory: a mapped file that the GPU reads over the bus, and CPU threads."""

from typing import Any

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.experts.mailbox import Mailbox


class HostExperts:
    """The experts of one model, and threads that compute them when `mailbox` asks.

    Raises UnsupportedError for a tier this machine lacks.
    """

    def __init__(self, threads: int, tier: str, mailbox: Mailbox) -> None:
        self.ops = CpuOps(threads, tier)
        self.mailbox = mailbox
        self.server = _csrc.ExpertServer(self.ops.runtime, *self.mailbox.arrays())
        self._registered: dict[int, RegisteredMemory | None] = {}

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> tuple[Any, int]:
        """The stack of experts where it lies, and the device's address of it: 0 if it has none."""
        weight = self.ops.map_weight(file, info)
        mapped = self.ops.mapped_file(file, info.shard)
        if mapped.address not in self._registered:
            self._registered[mapped.address] = RegisteredMemory.register(mapped.address, mapped.size)
        registered = self._registered[mapped.address]
        return weight, 0 if registered is None else weight.address + registered.offset

    @property
    def is_readable(self) -> bool:
        """Whether the device reads all of it."""
        return all(registered is not None for registered in self._registered.values())

    def add_layer(self, gate: Any, up: Any, down: Any) -> int:
        """The experts of the next layer, for requests by its number."""
        layer: int = self.server.add_layer(gate, up, down)
        return layer

    def close(self) -> None:
        """Nothing on the device may read the experts any more, and nothing may be asked."""
        self.server.end()
        for registered in self._registered.values():
            if registered is not None:
                registered.close()
        self._registered.clear()
