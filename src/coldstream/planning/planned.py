"""Planned: a plan with all that it was made from."""

from dataclasses import dataclass, replace
from functools import cached_property

from coldstream.placement.forecast import Known
from coldstream.placement.hardware import Hardware
from coldstream.placement.hit_rates import novelty_of
from coldstream.placement.limits import Limits, lock_warnings
from coldstream.placement.lock_file import LockRefusal, refusal_warning
from coldstream.placement.plan import PlacementPlan
from coldstream.placement.rates import Rates
from coldstream.placement.routing_trace import RoutingTrace
from coldstream.placement.run_plan import RunPlan
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.config import EngineConfig
from coldstream.planning.facts import hit_curve


@dataclass(frozen=True)
class Planned:
    """A plan, plans with more memory, and the inputs of all."""

    run: RunPlan
    larger_plan: PlacementPlan | None  # with more fast memory; None: all is resident, or there is none
    sizes: ModelSizes
    config: EngineConfig  # with a concrete device, context and prefetching
    hardware: Hardware
    trace: RoutingTrace | None
    disk_bytes_per_s: float | None = None
    # Plan with more RAM beside a GPU; None: the file is mapped, or it was not asked for.
    more_ram: RunPlan | None = None
    # In the least memory in which a GPU's prompts go in steps of SHORT_CHUNK tokens; None: they do, or more
    # than was asked about would be needed.
    longer_steps: PlacementPlan | None = None
    warnings: tuple[str, ...] = ()  # about the device and drafts, for people
    draft_reason: str = ""  # what drafts, and why
    locked_bytes: int = 0  # of RAM that are to be page-locked for a GPU, of the file or for a pool
    refusal: LockRefusal | None = None  # what the machine refused to page-lock last

    @property
    def plan(self) -> PlacementPlan:
        """What lies where."""
        return self.run.placement

    @property
    def reads_disk(self) -> bool:
        """Whether some experts are only on the disk."""
        return self.run.pool is not None or (self.plan.tier == "ram" and not self.plan.is_all_resident)

    @property
    def locked_share(self) -> float:
        """Of what is to be page-locked, what the GPU may read as far as is known."""
        if self.refusal is None:
            return 1.0
        return self.refusal.share_of(self.locked_bytes, in_pool=self.run.pool is not None)

    def lock_warnings(self, limits: Limits) -> tuple[str, ...]:
        """What may become of what is to be page-locked, or what was refused before."""
        if self.refusal is not None and self.locked_share < 1:
            in_pool = self.run.pool is not None
            return (refusal_warning(self.refusal, self.locked_bytes, limits, in_pool=in_pool),)
        return lock_warnings(self.locked_bytes, limits)

    @cached_property
    def known(self) -> Known:
        """Inputs of forecasts. Replays the trace if there is one, in seconds for a large model."""
        sizes = self.sizes
        if self.trace is not None:
            sizes = replace(sizes, novelty=novelty_of(self.trace))
        return Known(
            sizes,
            Rates.of(self.hardware, self.disk_bytes_per_s),
            hit_curve(self.trace, self.plan),
            self.run.expected_uses,
            may_prefetch=self.config.prefetch != 0,
            locked_share=self.locked_share,
        )
