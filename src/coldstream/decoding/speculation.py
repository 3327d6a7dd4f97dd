"""Speculation: a drafter for each sequence, the sizes of their trees, and what came of them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coldstream.decoding.draft_sizes import TreeSizes
from coldstream.decoding.drafters.drafter import Drafter
from coldstream.decoding.tree_size import SizeReason
from coldstream.kernels.fused.reference import FusedResult
from coldstream.kernels.ops import MAX_TREE_ROWS

MAX_TREE_NODES: Final = MAX_TREE_ROWS - 1  # beside the root

ExpertUses = tuple[int, int]  # of experts in fast memory, and of others


@dataclass(frozen=True)
class SpeculationStatistics:
    """What drafts brought to a request. The first token comes from the prompt, and is not counted here."""

    drafter: str
    steps: int  # of the model after the prompt, with drafts and without
    drafted_steps: int  # those with at least one node
    drafted: int  # nodes that were verified
    accepted_by_depth: tuple[int, ...]  # accepted nodes; depth 1 first
    sizes: tuple[tuple[int, int], ...]  # (nodes, steps with as many), ascending
    draft_s: float  # time of drafting
    build_s: float  # part of `draft_s`: putting trees together
    size_s: float  # deciding how much of drafts is verified
    verify_s: float  # computing steps, choosing and committing; all of the time of fused steps
    choose_s: float  # part of `verify_s`: choosing tokens along drafts, including the wait for a device
    fused_steps: int = 0  # steps that the device drafted and accepted by itself
    reasons: tuple[tuple[str, int], ...] = ()  # (name of a `SizeReason`, other steps with it)
    # Of steps with nodes: experts that all rows of a step used together, over all layers, and those of them
    # that were not in fast memory. None where nothing counts them.
    experts: int | None = None
    cold_experts: int | None = None

    @property
    def accepted(self) -> int:
        """Tokens that drafts gave."""
        return sum(self.accepted_by_depth)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gave, the one after the last accepted node included."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def accepted_per_draft(self) -> float:
        """Accepted nodes of a step that had any."""
        return self.accepted / self.drafted_steps if self.drafted_steps else 0.0

    @property
    def experts_per_draft(self) -> tuple[float, float] | None:
        """Experts that a step with nodes used, over all layers, and those of them not in fast memory."""
        if self.experts is None or self.cold_experts is None:
            return None
        return self.experts / self.drafted_steps, self.cold_experts / self.drafted_steps


@dataclass(frozen=True)
class StepCosts:
    """What a step took, in seconds; see `SpeculationStatistics`. expert_uses: of its experts, how many were
    in fast memory and how many not.
    """

    verify_s: float
    draft_s: float = 0.0
    build_s: float = 0.0
    size_s: float = 0.0
    choose_s: float = 0.0
    expert_uses: ExpertUses | None = None


class DraftCounts:
    """What drafts brought to one request so far."""

    def __init__(self, drafter: str) -> None:
        """drafter: its name."""
        self._drafter = drafter
        self._sizes: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._reasons: Counter[SizeReason] = Counter()
        self._draft_s = self._build_s = self._size_s = self._verify_s = self._choose_s = 0.0
        self._hits = self._misses = self._num_fused = 0

    def count(self, num_drafted: int, num_accepted: int, reason: SizeReason, costs: StepCosts) -> None:
        """A step verified so many nodes, for `reason`."""
        self._reasons[reason] += 1
        self._count(num_drafted, num_accepted, costs)

    def _count(self, num_drafted: int, num_accepted: int, costs: StepCosts) -> None:
        self._sizes[num_drafted] += 1
        if num_accepted:
            self._accepted.update(range(1, num_accepted + 1))
        self._draft_s += costs.draft_s
        self._build_s += costs.build_s
        self._size_s += costs.size_s
        self._verify_s += costs.verify_s
        self._choose_s += costs.choose_s
        if costs.expert_uses is not None and num_drafted:
            hits, misses = costs.expert_uses
            self._hits, self._misses = self._hits + hits, self._misses + misses

    def count_fused(self, accepted: FusedResult, seconds: float) -> None:
        """A device drafted and verified by itself, which took `seconds`."""
        self._count(accepted.num_drafted, max(0, len(accepted.token_ids) - 1), StepCosts(seconds))
        self._num_fused += 1

    def statistics(self) -> SpeculationStatistics:
        """All counts."""
        steps = self._sizes.total()
        deepest = max(self._accepted, default=0)
        num_experts = self._hits + self._misses
        return SpeculationStatistics(
            drafter=self._drafter,
            steps=steps,
            drafted_steps=steps - self._sizes[0],
            drafted=sum(size * count for size, count in self._sizes.items()),
            accepted_by_depth=tuple(self._accepted[depth] for depth in range(1, deepest + 1)),
            sizes=tuple(sorted((size, count) for size, count in self._sizes.items() if count)),
            draft_s=self._draft_s,
            build_s=self._build_s,
            size_s=self._size_s,
            verify_s=self._verify_s,
            choose_s=self._choose_s,
            fused_steps=self._num_fused,
            reasons=tuple(sorted((reason.name.lower(), count) for reason, count in self._reasons.items())),
            experts=num_experts or None,
            cold_experts=self._misses if num_experts else None,
        )


def uses_between(before: ExpertUses | None, after: ExpertUses | None) -> ExpertUses | None:
    """The difference of two counts; None if there are none."""
    if before is None or after is None:
        return None
    return after[0] - before[0], after[1] - before[1]


@dataclass(frozen=True)
class Speculation:
    """What drafts for a model. more: makes a drafter for a further sequence; None: there is only one."""

    drafter: Drafter
    sizes: TreeSizes
    more: Callable[[], Drafter] | None = None
