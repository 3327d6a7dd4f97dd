"""RunPlan: everything that is chosen before the first token. Pure.

`engine/planning.py` makes it once from a configuration, a model and a machine; `coldstream plan` prints it,
and runners carry it out. Knows numbers only, no tensors and no devices.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from coldstream.placement.plan import PlacementPlan

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RunPlan:
    """A placement, and how it is computed. Creation raises ValueError if it is contradictory."""

    placement: PlacementPlan
    threads: int  # of the CPU for computing; 0: the GPU holds all experts
    # Expected uses a step of each expert, [layers][experts]; None: nothing is known.
    uses: tuple[tuple[float, ...], ...] | None = None
    # How many of a token's 0, 1, … missing experts the GPU reads over the bus; empty if none can be missing.
    streamed: tuple[int, ...] = ()
    prefetch: int = 0  # experts of a layer that the GPU fetches before its router has run, at most
    prefetch_bytes: int = 0  # most of the ring that their places take; prefill uses all of it

    def __post_init__(self) -> None:
        model = self.placement.model
        if min(self.threads, self.prefetch, self.prefetch_bytes, *self.streamed, 0) < 0:
            raise ValueError("a number below 0")
        if self.prefetch_bytes > self.placement.ring_bytes:
            raise ValueError(
                f"prefetch_bytes: {self.prefetch_bytes} bytes of a ring of {self.placement.ring_bytes}"
            )
        if self.prefetch and not self.prefetch_bytes:
            raise ValueError(f"prefetch_bytes: none for {self.prefetch} experts of a layer")
        if any(count > misses for misses, count in enumerate(self.streamed)):
            raise ValueError("more experts are streamed than are missing")
        if self.uses is not None:
            shape = [len(row) for row in self.uses]
            if shape != [model.num_experts] * model.num_layers:
                raise ValueError("uses are not those of every expert")
            if not all(0 <= use < np.inf for row in self.uses for use in row):
                raise ValueError("a use that is no number from 0 on")

    @property
    def expected_uses(self) -> Array | None:
        """`uses` as float64 [layers, experts]."""
        return None if self.uses is None else np.array(self.uses, np.float64)

    @property
    def loaded(self) -> tuple[tuple[int, ...], ...]:
        """Experts that are loaded into slots before the first step, by layer.

        The residents; but in RAM without expected uses only those of pinned layers, as prompts fill free
        slots with the experts that they use.
        """
        placement = self.placement
        if placement.tier == "vram" or self.uses is not None:
            return placement.resident
        return tuple(
            ids if layer in placement.pinned_layers else () for layer, ids in enumerate(placement.resident)
        )
