"""Computes the routed experts of a model on a GPU that does not hold all of them.

Each (token, expert) pair is computed in one place: a slot, the ring, the mapped file over the bus, or the
CPU. Each place writes the rows of its pairs, and the sum over ranks reads each row there. In a decode step
the device shares pairs out (`decode.py`). In a prefill step the host does (`prefill.py`).
"""

from collections.abc import Collection, Iterable

from coldstream.experts.chosen_experts import ChosenExperts
from coldstream.experts.decode import DecodeExperts
from coldstream.experts.host import HostExperts
from coldstream.experts.partial_tables import PartialTables
from coldstream.experts.prefetch import Prefetching
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.experts.prefill import PrefillExperts
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import ALIGNMENT
from coldstream.kernels.experts.executor import WithWholeFfns
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.split import MissTimes
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, RouterWeights, Routing


class PartialExecutor(WithWholeFfns):
    """A `ModelExecutor` over slots, a ring of `ring_bytes`, the mapped file and the CPU.

    num_layers: that have experts. `ExpertResidency` fills slots and writes their addresses into `tables`.
    is_served_by_card: whether a further card computes what a decode step asks for, and not CPU and bus.
    Call `number_layers` and then `connect` before the first step. `host` is None over a `MemoryPlan`. Prefill
    steps use all of the ring. Decode steps use its beginning for prefetched experts, and the rest for staged
    ones.
    """

    def __init__(
        self,
        kernels: MoeKernels,
        num_layers: int,
        mailbox: Mailbox,
        host: HostExperts | None,
        whole_layers: Collection[int] = (),
        ring_bytes: int = 0,
        prefetching: Prefetching | None = None,
        *,
        is_served_by_card: bool = False,
    ) -> None:
        super().__init__(kernels)
        self._is_served_by_card = is_served_by_card
        device = kernels.device
        self.tables = PartialTables(device.memory, host, whole_layers)
        # Rounded down, as an allocation is rounded up to ALIGNMENT and must not exceed the plan's bytes.
        self.ring = device.memory.persistent((ring_bytes // ALIGNMENT * ALIGNMENT,), "uint8")
        self.prefetch: PrefetchRing | None = None
        staging = self.ring
        if prefetching is not None:
            self.prefetch = PrefetchRing(prefetching, self.ring, device.zeros, num_layers)
            staging = self.ring[self.prefetch.num_bytes :]
        chosen = ChosenExperts(device.zeros, num_layers, mailbox.ids.shape[1])
        self.decode = DecodeExperts(
            kernels, self.tables, mailbox, chosen, self.prefetch, staging, ends_requests=is_served_by_card
        )
        self.prefill = PrefillExperts(kernels, self.tables, host, self.ring)

    def number_layers(self, layers: Iterable[tuple[RouterWeights, ExpertWeights]]) -> None:
        """Call once after loading, with the routers and experts of all layers in the model's order.

        ValueError for experts that do not fit into the ring.
        """
        self.tables.number(layers)
        self.prefill.number_layers()

    def connect(self) -> None:
        """Call once before the first step: from then on the device reads experts over the bus, if it can.

        Waits until the file is locked for it. Raises as `HostExperts.device_address`.
        """
        self.tables.connect()
        self.decode.connect()

    def set_times(self, times: MissTimes) -> None:
        """Has missing experts of all steps divided by these times, at first. No step may be running."""
        if not self._is_served_by_card:
            self.decode.set_times(times)
        if self.prefill.stream is not None:
            self.prefill.stream.set_times(times)

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> ExpertTable | None:
        """See `ModelExecutor`."""
        return self.tables.map_stack(file, info)

    def route(self, x: Activations, weights: RouterWeights, experts: ExpertWeights) -> Routing:
        """See `Executor`."""
        if not experts.gate.is_partial or x.shape[0] > self.decode.max_rows:
            return self._kernels.route(x, weights)
        return self.decode.route(x, weights, experts)

    def compute(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """See `Executor`."""
        if not weights.gate.is_partial:
            routed, shared = self._kernels.outputs(x, routing.ids, weights)
            return ExpertOutputs(routed, shared, routing, bias=weights.down_bias)
        rows = self.prefill if routing.places is None else self.decode
        return rows.compute(x, routing, weights)

    def finish_step(self) -> None:
        """See `ModelExecutor`."""
        self.decode.finish_step()
