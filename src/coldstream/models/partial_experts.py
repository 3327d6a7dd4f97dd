"""What a runner has besides if its GPU does not hold all experts of the model."""

from collections.abc import Sequence

import numpy as np
import torch

from coldstream.experts.cache import ExpertCache
from coldstream.experts.residency import ExpertResidency, expert_bytes
from coldstream.kernels.experts.host import HostExperts
from coldstream.kernels.experts.mailbox import MAX_ROWS, Mailbox
from coldstream.kernels.hybrid_ops import HybridOps
from coldstream.models.spec import ModelSpec
from coldstream.placement.policies import DecayedFrequency, Policy


class PartialExperts:
    """Experts in slots and in the host's memory, and who computes them from step to step."""

    def __init__(self, spec: ModelSpec, threads: int, tier: str) -> None:
        mailbox = Mailbox.create(spec.num_layers, spec.num_experts_per_tok, spec.hidden_size)
        self.host = HostExperts(threads, tier, mailbox)
        self._residency: ExpertResidency | None = None

    def fill(
        self,
        ops: HybridOps,
        slot_bytes: int,
        streamed: Sequence[int],
        policy: Policy | None = None,
    ) -> None:
        """Takes `slot_bytes` of the device's memory for slots and fills them, when all layers have run once.

        streamed: see `streamed_counts`.
        """
        ops.streamed[: len(streamed)].copy_(torch.tensor(streamed, dtype=torch.int32))
        layer_bytes = [expert_bytes(stacks) for stacks in ops.layers]
        num_experts = len(ops.layers[0][0].addresses)
        counts = share_slots(layer_bytes, num_experts, slot_bytes)
        cache = ExpertCache(layer_bytes, num_experts, counts, policy or DecayedFrequency())
        slots = {
            size: torch.empty((count, size), dtype=torch.uint8, device="cuda")
            for size, count in counts.items()
        }
        self._residency = ExpertResidency(ops.layers, cache, slots, self.host.mailbox.used)
        self._residency.load(first_residents(layer_bytes, num_experts, counts))

    @property
    def cache(self) -> ExpertCache | None:
        return None if self._residency is None else self._residency.cache

    def start_step(self, rows: int) -> None:
        """Right before a step of `rows` rows, when the last one has ended."""
        if self._residency is not None:
            self._residency.start_step(rows if rows <= MAX_ROWS else 0)
        if rows <= MAX_ROWS:
            self.host.server.begin()

    def launched(self) -> None:
        """Right after it: what can be done while it runs."""
        if self._residency is not None:
            self._residency.launched()

    def ended(self) -> None:
        """When the step has run. Raises ModelChangedError if an expert of it could not be read."""
        self.host.server.end()
        self.host.server.check()
        self.host.mailbox.check()

    def close(self) -> None:
        """Everything on the device has ended."""
        if self._residency is not None:
            self._residency.close()
        self._residency = None
        self.host.close()


def share_slots(layer_bytes: Sequence[int], num_experts: int, budget: int) -> dict[int, int]:
    """Slots by size for `budget` bytes: of each size the same share of its experts."""
    sizes = sorted(set(layer_bytes))
    wanted = {size: layer_bytes.count(size) * num_experts for size in sizes}
    share = min(1.0, budget / sum(size * count for size, count in wanted.items()))
    return {size: int(share * count) for size, count in wanted.items()}


def first_residents(
    layer_bytes: Sequence[int], num_experts: int, slots: dict[int, int]
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """As many experts as there are slots, evenly from all layers."""
    left = dict(slots)
    chosen = []
    for expert in range(num_experts):
        for layer, size in enumerate(layer_bytes):
            if left[size] > 0:
                left[size] -= 1
                chosen.append(layer * num_experts + expert)
    return np.array(chosen, np.int64)
