"""The engine in numbers, for people and their dashboards."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from coldstream.experts.expert_map import ExpertMap
from coldstream.experts.gpu_statistics import ExpertTimes
from coldstream.kernels.fused.reference import FusedResult
from coldstream.kvcache import CacheSize, PrefixStatistics
from coldstream.models.runner import ModelRunner


@dataclass(frozen=True)
class EngineStatistics:
    """Counts are since the engine was made, unless they are of now."""

    running: int  # answers with memory, now
    waiting: int  # answers without, now
    finished_requests: int  # cancelled and failed ones not included
    cancelled_requests: int
    failed_requests: int
    prompt_tokens: int  # tokens of the prompts of requests that have begun
    reused_tokens: int  # prompt tokens that were not computed again
    generated_tokens: int
    steps: int
    computed_rows: int  # of all steps
    step_s: float  # time of all steps
    ahead_steps: int  # launched before the host knew the tokens
    preemptions: int  # answers that lost their memory for a while
    memory: CacheSize  # what all sequences may take
    free_memory: CacheSize  # now; memory of kept prefixes is not free, but is evicted where it is needed
    prefixes: PrefixStatistics
    expert_hits: int | None  # uses of experts in fast memory; None: all are there
    expert_misses: int | None
    drafts: int = 0  # drafts that were verified, each in a step
    drafted_tokens: int = 0  # their nodes
    accepted_tokens: int = 0  # drafted tokens that the model accepted
    # The parts of `step_s`, in turn. Of steps that a device drafts itself, all behind the launch is wait_s.
    draft_s: float = 0.0  # drafts, which the next step verifies
    launch_s: float = 0.0  # until a GPU has the step; on the CPU all that computes it
    wait_s: float = 0.0  # until its tokens are there
    token_s: float = 0.0  # their texts, tokens along drafts, and what is kept of prompts
    expert_times: ExpertTimes | None = None  # of `Engine.live` alone; None as well if all are in fast memory

    def going_on(self, before: "EngineStatistics | None") -> "EngineStatistics":
        """With the counts of an engine that has ended before this one, so that they only grow."""
        if before is None:
            return self
        tiers = self.prefixes.tiers
        total = total_statistics([self, replace(before, prefixes=replace(before.prefixes, tiers=tiers))])
        prefixes = replace(
            total.prefixes,
            kept=self.prefixes.kept,
            pinned=self.prefixes.pinned,
            remembered_tokens=self.prefixes.remembered_tokens,
            tiers=tiers,
        )
        return replace(
            total,
            running=self.running,
            waiting=self.waiting,
            memory=self.memory,
            free_memory=self.free_memory,
            prefixes=prefixes,
        )


def total_statistics(each: Sequence[EngineStatistics]) -> EngineStatistics:
    """The sums of all counts. What an engine does not count (None) counts as nothing beside one that does."""
    statistics = _total(each)
    assert isinstance(statistics, EngineStatistics)
    return statistics


def _total(values: Sequence[Any]) -> Any:
    """The sum of numbers; of dataclasses and tuples by their places; the first of other values."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if is_dataclass(first) and not isinstance(first, type):
        sums = {each.name: _total([getattr(value, each.name) for value in values]) for each in fields(first)}
        return type(first)(**sums)
    if isinstance(first, tuple):
        return tuple(_total(places) for places in zip(*values, strict=True))
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(values)
    return first


@dataclass(frozen=True)
class LiveState:
    """The engine as it is between two steps."""

    statistics: EngineStatistics
    experts: ExpertMap | None  # None: nothing notes their uses


@dataclass
class EngineCounts:
    """What an engine counts; see `EngineStatistics`."""

    finished_requests: int = 0
    cancelled_requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    computed_rows: int = 0
    step_s: float = 0.0
    ahead_steps: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    token_s: float = 0.0

    def add_times(self, begin: float, drafted: float, launched: float, arrived: float, end: float) -> None:
        """The times at which the parts of a step ended, that of its tokens' arrival included."""
        self.draft_s += drafted - begin
        self.launch_s += launched - drafted
        self.wait_s += arrived - launched
        self.token_s += end - arrived
        self.step_s += end - begin

    def count_step(self, rows: Collection[int]) -> None:
        """A step with so many rows of each answer, nodes included."""
        self.steps += 1
        self.computed_rows += sum(rows)

    def count_draft(self, num_nodes: int) -> None:
        """A draft of so many nodes that a step verifies."""
        self.drafts += 1
        self.drafted_tokens += num_nodes

    def count_fused(self, accepted: FusedResult) -> None:
        """A step that a device drafted and verified by itself."""
        self.count_step([1 + accepted.num_drafted])
        if accepted.num_drafted:
            self.count_draft(accepted.num_drafted)
        self.accepted_tokens += max(0, len(accepted.token_ids) - 1)

    def statistics(
        self, runner: ModelRunner, *, running: int, waiting: int, prefixes: PrefixStatistics
    ) -> EngineStatistics:
        """All of it, with what a runner and its cache say now."""
        hits, misses = runner.expert_uses or (None, None)
        return EngineStatistics(
            running=running,
            waiting=waiting,
            memory=runner.cache_size,
            free_memory=runner.free,
            prefixes=prefixes,
            expert_hits=hits,
            expert_misses=misses,
            **vars(self),
        )
