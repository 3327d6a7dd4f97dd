"""Speculation: a drafter for each sequence, the sizes of their trees, and what came of them."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coldstream.decoding.draft_sizes import TreeSizes, TriedDraft
from coldstream.decoding.drafters.drafter import Drafter
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_size import SizeReason
from coldstream.kernels.ops import MAX_TREE_ROWS
from coldstream.kernels.rounds.reference import Accepted

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
    build_s: float  # of this, of putting trees together
    size_s: float  # of deciding how much of drafts is verified
    verify_s: float  # of computing steps, choosing and committing; of rounds, all of their time
    choose_s: float  # of this, of choosing tokens along drafts, for which a device's step is waited for
    rounds: int = 0  # of the steps, those that the device drafted and accepted by itself
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
        self._hits = self._misses = self._num_rounds = 0

    def count(self, num_drafted: int, num_accepted: int, reason: SizeReason, costs: StepCosts) -> None:
        """A step verified so many nodes, for `reason`."""
        self._reasons[reason] += 1
        self._count(num_drafted, num_accepted, costs)

    def count_plain(self, num_steps: int, reason: SizeReason, seconds: float) -> None:
        """So many steps, for which nothing was drafted, for `reason`, took so long together."""
        self._reasons[reason] += num_steps
        self._sizes[0] += num_steps
        self._verify_s += seconds

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

    def count_round(self, accepted: Accepted, seconds: float) -> None:
        """A device drafted and verified by itself, which took `seconds`."""
        self._count(accepted.num_drafted, max(0, len(accepted.token_ids) - 1), StepCosts(seconds))
        self._num_rounds += 1

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
            rounds=self._num_rounds,
            reasons=tuple(sorted((reason.name.lower(), count) for reason, count in self._reasons.items())),
            experts=num_experts or None,
            cold_experts=self._misses if num_experts else None,
        )


def uses_between(before: ExpertUses | None, after: ExpertUses | None) -> ExpertUses | None:
    """The difference of two counts; None if there are none."""
    if before is None or after is None:
        return None
    return after[0] - before[0], after[1] - before[1]


class Speculation:
    """Drafts for one sequence, of which this implements `Drafts`, and what others need to draft beside it."""

    def __init__(
        self,
        drafter: Drafter,
        sizes: TreeSizes,
        more: Callable[[], Drafter] | None = None,
        expert_uses: Callable[[], ExpertUses | None] = lambda: None,
        num_captured: Callable[[], int] = lambda: 0,
    ) -> None:
        """more: makes a drafter like the first one for a further sequence; None: there is only one.
        expert_uses: those of the model's steps so far whose tokens are known, if they are counted.
        num_captured: how many steps so far made what later ones use: their time says nothing of those.
        """
        self.drafter, self.sizes, self.more = drafter, sizes, more
        self._expert_uses, self._num_captured = expert_uses, num_captured
        self.rounds = sizes.rounds
        self._is_idle: bool | None = None  # None: not known since the last step that was told of
        self.start()

    def start(self) -> None:
        """Begins the statistics of a request."""
        self._is_idle, self._is_resting = None, False
        self._forget_draft()
        self._captured_before = 0
        self._counts = DraftCounts(self.drafter.name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing will be drafted for long, so that the drafter need not be told of tokens.

        Asked for every token, and the same until a step is told of.
        """
        if self._is_idle is None:
            self._is_idle = self.rounds.is_idle() if self._is_resting else self.sizes.is_idle()
        return self._is_idle

    def rests(self) -> bool:
        """See `Drafts`."""
        self._is_resting, self._is_idle = self.rounds.rests(), None
        return self._is_resting

    def begin_rounds(self) -> None:
        """See `Drafts`."""
        self._captured_before = self._num_captured()
        self.rounds.start()

    def next_round(self) -> int:
        """See `Drafts`."""
        return self.rounds.next()

    def will_draft(self, most: int) -> bool:
        """See `Drafts`."""
        return not self.rounds.rests() if self._is_resting else self.sizes.will_draft(most)

    def draft(self, context: Sequence[int], most: int) -> TokenTree:
        """A tree of at most `most` nodes after `context`, perhaps an empty one."""
        self._forget_draft()
        budget = self.sizes.budget(min(most, MAX_TREE_NODES))
        if budget <= 0:
            return NO_DRAFT
        self._was_asked, self._captured_before = True, self._num_captured()
        start = time.perf_counter()
        tree = self.drafter.propose(context, budget)
        drafted = time.perf_counter()
        self._draft_s = drafted - start
        (count,) = self.sizes.sizes([tree], self._draft_s)
        self._size_s = time.perf_counter() - drafted
        self._tree, self._build_s = tree.first(count), tree.build_s
        self._uses_before = self._expert_uses() if count else None
        return self._tree

    def verified(self, nodes: Sequence[int], seconds: float, choose_s: float, *, is_cut: bool) -> None:
        """See `Drafts`."""
        uses = uses_between(self._uses_before, self._expert_uses())
        self._record(TriedDraft(self._tree, nodes, is_cut), self._costs(seconds, choose_s, uses))

    def num_together(self) -> int:
        """See `Drafts`."""
        return 1 if self._was_asked or self._is_resting else self.sizes.num_together()

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool) -> None:
        """See `Drafts`."""
        self._is_idle = None
        if self._is_resting:
            self._counts.count_plain(num_steps, SizeReason.NOT_ASKED, seconds)
            self.rounds.went_on(num_steps, seconds, is_usual=is_usual)
            return
        if self._was_asked:
            assert num_steps == 1, "a step whose draft came to nothing is told of by itself"
            self._record(TriedDraft(NO_DRAFT, ()), self._costs(seconds))
            return
        self._counts.count_plain(num_steps, self.sizes.reason, seconds)
        self.sizes.went_on(num_steps, seconds, is_usual=is_usual)

    def _costs(self, verify_s: float, choose_s: float = 0.0, uses: ExpertUses | None = None) -> StepCosts:
        return StepCosts(verify_s, self._draft_s, self._build_s, self._size_s, choose_s, uses)

    def _record(self, tried: TriedDraft, costs: StepCosts) -> None:
        """What came of the last draft, which is over: a step that follows without one has none."""
        self._counts.count(len(tried.tree), len(tried.accepted), self.sizes.reason, costs)
        self._is_idle = None
        is_usual = self._num_captured() == self._captured_before
        self.sizes.record([tried], costs.verify_s + costs.size_s, is_usual=is_usual)
        self._forget_draft()

    def _forget_draft(self) -> None:
        self._tree, self._uses_before, self._was_asked = NO_DRAFT, None, False
        self._draft_s = self._build_s = self._size_s = 0.0

    def round_ended(self, accepted: Accepted, seconds: float) -> None:
        """See `Drafts`."""
        num_captured = self._num_captured()
        self.rounds.record(accepted, seconds, is_usual=num_captured == self._captured_before)
        self._captured_before = num_captured
        self._counts.count_round(accepted, seconds)

    def statistics(self) -> SpeculationStatistics:
        """Those of the request that `start` began."""
        return self._counts.statistics()
