"""DiskTier: experts in RAM under a budget, the others on the disk.

A step reads missing experts into slots of the pool while it computes those that are there
(`kernels/csrc/quant/expert_pool.h`). This module works between two steps. The policy observes which experts
were used, and orders the slots by score: the next step overwrites the lowest scores first. Admission needs no
decision, as a step must read every expert that it uses. The plan chooses the number of slots, and the experts
that are loaded before the first step.

The unit of work is a step. Prefill steps use every expert sooner or later: the policy does not observe them,
and they overwrite only the first slots in the order. Knows no ops and no model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from coldstream.experts.cpu.pooled_stacks import PooledStacks
from coldstream.experts.expert_map import ExpertMap, ExpertUses
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.placement.policies import DecayedFrequency, Policy

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]

DECODE_TOKENS: Final = 4  # a step of more tokens counts as prefill


@dataclass(frozen=True)
class DiskStatistics:
    """Counts since the model was opened. hits, misses: experts of a step's layers in RAM, or not."""

    hits: int
    misses: int
    bytes_read: int
    wait_s: float  # waiting for the disk with nothing left to compute
    retries: int  # of failed reads
    slot_bytes: int  # RAM of all slots
    num_slots: int
    num_experts: int  # of all layers
    is_direct: bool  # whether reads go past the page cache

    @classmethod
    def of(cls, stacks: PooledStacks) -> Self:
        """The counts of a pool."""
        hits, misses, wait_s, bytes_read, retries = stacks.pool.count()
        return cls(
            hits=hits,
            misses=misses,
            bytes_read=bytes_read,
            wait_s=wait_s,
            retries=retries,
            slot_bytes=stacks.slot_bytes,
            num_slots=sum(stacks.num_slots),
            num_experts=stacks.num_layers * stacks.num_experts,
            is_direct=stacks.pool.is_direct,
        )

    @property
    def hit_rate(self) -> float:
        """0 before the first step."""
        return self.hits / max(1, self.hits + self.misses)


class DiskTier:
    """The experts of an open file, and which of them are in RAM.

    stacks: tensors [experts, rows, cols] of each layer. Call `allocate` once, perhaps `load`, then
    `begin_step` and `end_step` around each run of a graph captured over `pool`.
    """

    def __init__(
        self,
        file: GGUFFile,
        stacks: Sequence[Sequence[TensorInfo]],
        num_experts_per_tok: int,
        policy: Policy | None = None,
    ) -> None:
        self._num_experts_per_tok = num_experts_per_tok
        self.stacks = PooledStacks(file, stacks)
        self.pool = self.stacks.pool
        self._policy = policy or DecayedFrequency()
        self._policy.start(np.zeros(self.num_experts))
        self._uses = ExpertUses(self.stacks.num_layers, self.stacks.num_experts)
        self._is_prefill = False

    @property
    def num_experts(self) -> int:
        """Experts of all layers."""
        return self.stacks.num_layers * self.stacks.num_experts

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of an expert's slot, by layer."""
        return self.stacks.expert_bytes

    def allocate(
        self, num_slots: Mapping[int, int], uses: Array | None = None, pinned_layers: Sequence[int] = ()
    ) -> None:
        """Allocates slots, `num_slots` by bytes of an expert, of each size enough for one token.

        uses: expected uses per step, float64 [layers, experts], or None. pinned_layers: layers whose experts
        are never overwritten, for all of which there must be further slots. Raises MemoryError.
        """
        least = self._num_experts_per_tok
        assert min(num_slots.values()) >= least, "a plan has room for the experts of one token"
        self.stacks.allocate(num_slots, 2 * least)
        for layer in pinned_layers:
            self.pool.keep(layer)
        if uses is not None:
            self._policy.start(uses.ravel())

    def load(self, experts: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Reads experts, given by layer, into slots that must be free. Raises ModelChangedError.

        progress is called with (experts read, experts in all).
        """
        done, num_all = 0, sum(map(len, experts))
        for layer, ids in enumerate(experts):
            self.pool.preload(layer, list(ids))
            done += len(ids)
            if progress is not None and ids:
                progress(done, num_all)
        self.stacks.order(self._policy.scores)

    def begin_step(self, num_tokens: int) -> None:
        """Call before a graph runs on `num_tokens` rows."""
        self._is_prefill = num_tokens > DECODE_TOKENS
        self.pool.begin_step(self._is_prefill)

    def end_step(self) -> None:
        """Call after the graph has run. The policy observes the step, and slots are ordered."""
        if not self._is_prefill:
            used = self.pool.used()
            self._policy.observe(used)
            self._uses.observe(used)
        self.stacks.order(self._policy.scores)

    def forget(self) -> None:
        """Empties all slots after a step that failed, as their bytes may be incomplete."""
        self.pool.clear()

    def expert_map(self, layers: Sequence[int]) -> ExpertMap:
        """Recent uses, and which experts are in RAM. layers: their numbers. Between steps."""
        return ExpertMap.of(layers, self._uses, self.stacks.in_memory())

    def statistics(self) -> DiskStatistics:
        """What the tier has done so far."""
        return DiskStatistics.of(self.stacks)
