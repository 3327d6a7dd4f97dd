"""RunPlan: everything that is chosen before the first token. Pure.

`planning/choose.py` chooses it once from a configuration, a model and a machine; `coldstream plan` prints it,
and runners carry it out. Knows numbers only, no tensors and no devices.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from coldstream.kernels.experts.shapes import MAX_CARD_ROWS, MAX_MAILBOX_ROWS, MAX_SHARED_ROWS
from coldstream.kernels.experts.split import MissTimes
from coldstream.placement.plan import PlacementPlan
from coldstream.placement.pool_plan import PoolPlan
from coldstream.placement.sizes import SHARE_WITH_PLACES

Array = np.ndarray[Any, Any]

# The fields of a RunPlan that are whole numbers from 0 on.
COUNTS: Final = (
    "threads",
    "prefetch",
    "prefetch_bytes",
    "layers_ahead",
    "max_cpu_rows",
    "copy_bytes_per_step",
    "tree_budget",
    "prompt_cache_bytes",
)
SPEC_TYPES: Final = ("none", "mtp", "dflash", "ngram")
# Whether a token's experts are fetched before their router has run, where there are places: always; at first;
# or not at first. What steps take says it later.
AHEAD: Final = ("fixed", "first", "later")


_MAX_ROWS: Final = 2**16 - 1  # in a request to the CPU


@dataclass(frozen=True)
class RunPlan:
    """A placement, and how it is computed. Creation raises ValueError if it is contradictory."""

    placement: PlacementPlan
    threads: int  # CPU threads that compute; 0: the GPU holds all experts
    # Expected uses a step of each expert, [layers][experts]; None: nothing is known.
    uses: tuple[tuple[float, ...], ...] | None = None
    # Times of a missing expert, by which bus and CPU share. None: the GPU reads none over the bus.
    miss_times: MissTimes | None = None
    prefetch: int = 0  # experts of a layer that the GPU fetches before its router has run, at most
    prefetch_bytes: int = 0  # most of the ring that their places take; prefill uses all of it
    layers_ahead: int = 0  # layers between the router that guesses experts and their own
    ahead: str = "fixed"  # of AHEAD
    max_cpu_rows: int = 0  # most tokens of a prefill step in which the CPU computes missing experts
    copy_bytes_per_step: int = 0  # most bytes of experts that begin to be copied into slots beside a step
    attention_window: int | None = None  # positions that a token attends to, its own included; None: all
    spec_type: str = "none"  # what drafts tokens, of SPEC_TYPES
    tree_budget: int = 0  # nodes of a draft tree; 0: as many as pay in each step
    # Experts in RAM beside a GPU, with others on the disk; None: all experts that the GPU lacks are mapped.
    pool: PoolPlan | None = None
    prompt_cache_bytes: int = 0  # RAM for kept prefixes of prompts, which the placement or the pool counts
    card: int | None = None  # the GPU that has all experts which the first one may lack; None: none has

    def __post_init__(self) -> None:
        model = self.placement.model
        if min(getattr(self, name) for name in COUNTS) < 0:
            raise ValueError("a number below 0")
        if self.prefetch_bytes > self.placement.ring_bytes:
            raise ValueError(
                f"prefetch_bytes: {self.prefetch_bytes} bytes of a ring of {self.placement.ring_bytes}"
            )
        for name in ("prefetch_bytes", "layers_ahead"):
            if self.prefetch and not getattr(self, name):
                raise ValueError(f"{name}: none for {self.prefetch} experts of a layer")
        if self.ahead not in AHEAD:
            raise ValueError(f"ahead: {self.ahead!r} is none of {', '.join(AHEAD)}")
        most = min(self.placement.fixed.chunk_size, _MAX_ROWS)
        if self.max_cpu_rows > most:
            raise ValueError(f"max_cpu_rows: {self.max_cpu_rows}, a step asks the CPU for at most {most}")
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(f"attention_window: {self.attention_window} positions")
        if self.spec_type not in SPEC_TYPES:
            raise ValueError(f"spec_type: {self.spec_type!r} is none of {', '.join(SPEC_TYPES)}")
        if self.spec_type != "none" and self.placement.fixed.num_tree_rows <= max(1, self.tree_budget):
            raise ValueError(f"tree_budget: no room for the rows of {self.tree_budget or 1} nodes and a root")
        if self.pool is not None:
            self._check_pool(self.pool)
        if self.card is not None:
            self._check_card(self.card)
        self._check_prompt_cache()
        if self.uses is not None:
            shape = [len(row) for row in self.uses]
            if shape != [model.num_experts] * model.num_layers:
                raise ValueError("uses are not those of every expert")
            if not all(0 <= use < np.inf for row in self.uses for use in row):
                raise ValueError("a use that is no number from 0 on")

    def _check_pool(self, pool: PoolPlan) -> None:
        placement = self.placement
        if placement.tier != "vram" or placement.is_all_resident:
            raise ValueError("a pool in RAM, and no GPU that lacks an expert")
        wholes = tuple(layer for layer, size in enumerate(pool.expert_bytes) if not size)
        if len(pool.loaded) != placement.model.num_layers or wholes != placement.pinned_layers:
            raise ValueError("a pool in RAM for other layers than those that may miss an expert")
        if any(ids and ids[-1] >= placement.model.num_experts for ids in pool.loaded):
            raise ValueError(f"an expert in RAM from {placement.model.num_experts} on")

    def _check_card(self, card: int) -> None:
        if card < 1 or self.placement.tier != "vram" or self.placement.is_all_resident:
            raise ValueError(f"card: {card}, and no other GPU that lacks an expert")
        if self.prefetch:
            raise ValueError(f"prefetch: {self.prefetch} experts of a layer, which card {card} has")

    def _check_prompt_cache(self) -> None:
        placement = self.placement
        counts = [(placement.fixed.prompt_cache, self.prompt_cache_bytes if placement.tier == "ram" else 0)]
        if self.pool is not None:
            counts.append((self.pool.fixed.prompt_cache, self.prompt_cache_bytes))
        for counted, expected in counts:
            if counted != expected:
                raise ValueError(f"prompt_cache: {counted} bytes are counted for {expected}")

    @property
    def shared_rows(self) -> int:
        """Most rows of a step in which the GPU itself shares missing experts out.

        In longer steps the host shares them out, and experts are copied group by group. The limit is
        MAX_MAILBOX_ROWS where the GPU cannot read all over the bus, or where the ring has too few places for
        a layer's experts, and MAX_CARD_ROWS where a further card is asked.
        """
        if self.card is not None:
            return MAX_CARD_ROWS
        placement = self.placement
        room = placement.ring_bytes - self.prefetch_bytes
        wanted = SHARE_WITH_PLACES * placement.model.num_experts * max(placement.expert_bytes)
        has_places = placement.model.num_experts > 1 and room >= wanted
        reads_all = self.miss_times is not None and self.pool is None
        return MAX_SHARED_ROWS if reads_all and has_places else MAX_MAILBOX_ROWS

    @property
    def expected_uses(self) -> Array | None:
        """`uses` as float64 [layers, experts]."""
        return None if self.uses is None else np.array(self.uses, np.float64)

    @property
    def loaded(self) -> tuple[tuple[int, ...], ...]:
        """Experts that are loaded into slots before the first step, by layer.

        They are the residents. In RAM without expected uses they are only those of pinned layers: prompts
        fill free slots with the experts that they use.
        """
        placement = self.placement
        if placement.tier == "vram" or self.uses is not None:
            return placement.resident
        return tuple(
            ids if layer in placement.pinned_layers else () for layer, ids in enumerate(placement.resident)
        )
