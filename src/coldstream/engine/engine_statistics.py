"""The engine in numbers, for people and their dashboards."""

from collections.abc import Collection
from dataclasses import dataclass

from coldstream.experts.expert_map import ExpertMap
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
