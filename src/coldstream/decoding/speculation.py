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
    verify_s: float  # of computing steps, choosing and committing; of rounds, all of their time
    rounds: int = 0  # of the steps, those that the device drafted and accepted by itself
    reasons: tuple[tuple[str, int], ...] = ()  # (name of a `SizeReason`, other steps with it)

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


class DraftCounts:
    """What drafts brought to one request so far."""

    def __init__(self, drafter: str) -> None:
        """drafter: its name."""
        self._drafter = drafter
        self._sizes: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._reasons: Counter[SizeReason] = Counter()
        self._draft_s = self._verify_s = 0.0
        self._num_rounds = 0

    def count(
        self, num_drafted: int, num_accepted: int, draft_s: float, seconds: float, reason: SizeReason
    ) -> None:
        """A step verified so many nodes, for `reason`, and took `seconds` besides drafting."""
        self._reasons[reason] += 1
        self._count(num_drafted, num_accepted, draft_s, seconds)

    def _count(self, num_drafted: int, num_accepted: int, draft_s: float, seconds: float) -> None:
        self._sizes[num_drafted] += 1
        if num_accepted:
            self._accepted.update(range(1, num_accepted + 1))
        self._draft_s += draft_s
        self._verify_s += seconds

    def count_round(self, accepted: Accepted, seconds: float) -> None:
        """A device drafted and verified by itself, which took `seconds`."""
        self._count(accepted.num_drafted, max(0, len(accepted.token_ids) - 1), 0.0, seconds)
        self._num_rounds += 1

    def statistics(self) -> SpeculationStatistics:
        """All counts."""
        steps = self._sizes.total()
        deepest = max(self._accepted, default=0)
        return SpeculationStatistics(
            drafter=self._drafter,
            steps=steps,
            drafted_steps=steps - self._sizes[0],
            drafted=sum(size * count for size, count in self._sizes.items()),
            accepted_by_depth=tuple(self._accepted[depth] for depth in range(1, deepest + 1)),
            sizes=tuple(sorted((size, count) for size, count in self._sizes.items() if count)),
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            rounds=self._num_rounds,
            reasons=tuple(sorted((reason.name.lower(), count) for reason, count in self._reasons.items())),
        )


class Speculation:
    """Drafts for one sequence, of which this implements `Drafts`, and what others need to draft beside it."""

    def __init__(self, drafter: Drafter, sizes: TreeSizes, more: Callable[[], Drafter] | None = None) -> None:
        """more: makes a drafter like the first one for a further sequence; None: there is only one."""
        self.drafter, self.sizes, self.more = drafter, sizes, more
        self.rounds = sizes.rounds
        self.start()

    def start(self) -> None:
        """Begins the statistics of a request."""
        self._tree, self._draft_s = NO_DRAFT, 0.0
        self._counts = DraftCounts(self.drafter.name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing will be drafted for long, so that the drafter need not be told of tokens."""
        return self.sizes.is_idle()

    def begin_rounds(self) -> None:
        """See `Drafts`."""
        self.rounds.start()

    def next_round(self) -> int:
        """See `Drafts`."""
        return self.rounds.next()

    def will_draft(self, most: int) -> bool:
        """See `Drafts`."""
        return self.sizes.will_draft(most)

    def draft(self, context: Sequence[int], most: int) -> TokenTree:
        """A tree of at most `most` nodes after `context`, perhaps an empty one."""
        self._tree, self._draft_s = NO_DRAFT, 0.0
        budget = self.sizes.budget(min(most, MAX_TREE_NODES))
        if budget <= 0:
            return NO_DRAFT
        start = time.perf_counter()
        tree = self.drafter.propose(context, budget)
        self._draft_s = time.perf_counter() - start
        (count,) = self.sizes.sizes([tree], self._draft_s)
        self._tree = tree.first(count)
        return self._tree

    def verified(self, nodes: Sequence[int], seconds: float, *, is_cut: bool) -> None:
        """See `Drafts`."""
        self._record(nodes, seconds, is_cut=is_cut)

    def went_on(self, seconds: float, *, is_usual: bool) -> None:
        """See `Drafts`."""
        self._record((), seconds, is_usual=is_usual)

    def _record(
        self, nodes: Sequence[int], seconds: float, *, is_cut: bool = False, is_usual: bool = True
    ) -> None:
        """What came of the last draft, which is over: a step that follows without one has none."""
        tree, self._tree = self._tree, NO_DRAFT
        draft_s, self._draft_s = self._draft_s, 0.0
        self._counts.count(len(tree), len(nodes), draft_s, seconds, self.sizes.reason)
        self.sizes.record([TriedDraft(tree, nodes, is_cut)], seconds, is_usual=is_usual)

    def round_ended(self, accepted: Accepted, seconds: float) -> None:
        """See `Drafts`."""
        self.rounds.record(accepted, seconds)
        self._counts.count_round(accepted, seconds)

    def statistics(self) -> SpeculationStatistics:
        """Those of the request that `start` began."""
        return self._counts.statistics()
