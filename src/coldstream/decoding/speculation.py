"""Speculation for one sequence: a drafter, the size of its trees, and what came of them."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from coldstream.decoding.acceptance import AcceptanceModel
from coldstream.decoding.drafters.drafter import Drafter
from coldstream.decoding.round_sizes import FixedRounds, RoundsByCost, RoundSizes
from coldstream.decoding.row_times import StepTimes
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_size import SizePolicy, TreeSize
from coldstream.kernels.ops import MAX_TREE_ROWS
from coldstream.kernels.rounds.reference import Accepted

MAX_TREE_NODES: Final = MAX_TREE_ROWS - 1  # beside the root
_FIRST_BUDGET: Final = 8
_MORE_NODES: Final = 2  # than were useful lately, since a draft costs more the more nodes are asked for
_USEFUL_KEPT: Final = 0.95
_AWAKE_STEPS: Final = 512  # of _WAKE_DISTANCE steps in which drafts do not pay
_WAKE_DISTANCE: Final = 4096


class TreeSizes(Protocol):
    """Chooses how much is drafted and how much of it is verified."""

    def budget(self, most: int) -> int:
        """Nodes that the drafter is asked for, at most `most`; 0: the next step is a plain one."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing will be drafted for long, so that the drafter need not be told of tokens."""

    @property
    def rounds(self) -> RoundSizes:
        """The sizes where a device drafts and accepts by itself."""

    def size(self, tree: TokenTree, draft_s: float) -> int:
        """How many of the first nodes of `tree` are verified; drafting it took `draft_s` seconds."""

    def record(self, tree: TokenTree, nodes: Sequence[int], seconds: float, *, is_cut: bool) -> None:
        """What came of the nodes of `tree` that were verified, see `Drafts.verified`."""


@dataclass(frozen=True)
class FixedSizes:
    """Trees of `num_nodes` nodes, whatever they cost."""

    num_nodes: int
    is_idle = False

    @property
    def rounds(self) -> RoundSizes:
        return FixedRounds(self.num_nodes)

    def budget(self, most: int) -> int:
        return min(self.num_nodes, most)

    def size(self, tree: TokenTree, draft_s: float) -> int:
        return len(tree)

    def record(self, tree: TokenTree, nodes: Sequence[int], seconds: float, *, is_cut: bool) -> None:
        pass


class SizesByCost:
    """Trees of as many nodes as give the most expected tokens a second, by what was accepted and what steps
    took so far; see `tree_size.py` and `acceptance.py`.

    Being told of tokens costs a drafter time too. Once drafts have not paid for 512 steps, it is told of 512
    in 4,096 steps only, and asked among these.
    """

    def __init__(self, drafter_name: str) -> None:
        self.rounds: RoundSizes = RoundsByCost()
        self._name = drafter_name
        self._acceptance = AcceptanceModel()
        self._policy = SizePolicy(StepTimes())
        self._chosen: TreeSize | None = None
        self._useful = float(_FIRST_BUDGET)  # nodes, a maximum that decays
        self._num_lost = 0  # steps since drafts paid

    @property
    def is_idle(self) -> bool:
        return self._num_lost % _WAKE_DISTANCE >= _AWAKE_STEPS

    def budget(self, most: int) -> int:
        self._chosen = None
        if most < 1 or self.is_idle or not self._policy.should_draft():
            return 0
        return min(most, round(self._useful) + _MORE_NODES)

    def size(self, tree: TokenTree, draft_s: float) -> int:
        self._chosen = self._policy.choose(self._acceptance.expected(self._name, tree), draft_s)
        self._useful = max(self._chosen.num_nodes, self._useful * _USEFUL_KEPT)
        return self._chosen.num_nodes

    def record(self, tree: TokenTree, nodes: Sequence[int], seconds: float, *, is_cut: bool) -> None:
        self._policy.record(seconds, self._chosen, 1.0 + len(nodes))
        self._num_lost = 0 if self._policy.pays else self._num_lost + 1
        if not is_cut:
            self._acceptance.record(self._name, tree, nodes)


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


class Speculation:
    """Drafts for one sequence; implements `Drafts`."""

    def __init__(self, drafter: Drafter, sizes: TreeSizes) -> None:
        self.drafter = drafter
        self._sizes, self._rounds = sizes, sizes.rounds
        self.start()

    def start(self) -> None:
        """Begins the statistics of a request."""
        self._tree, self._draft_s = NO_DRAFT, 0.0
        self._counts: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._total_draft_s = self._total_verify_s = 0.0
        self._num_rounds = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing will be drafted for long, so that the drafter need not be told of tokens."""
        return self._sizes.is_idle

    @property
    def most_round_nodes(self) -> int:
        """The most tokens that a round drafts."""
        return self._rounds.most

    def begin_rounds(self) -> None:
        """See `Drafts`."""
        self._rounds.start()

    def next_round(self) -> int:
        """See `Drafts`."""
        return self._rounds.next()

    def draft(self, context: Sequence[int], most: int) -> TokenTree:
        """A tree of at most `most` nodes after `context`, perhaps an empty one."""
        self._tree, self._draft_s = NO_DRAFT, 0.0
        budget = self._sizes.budget(min(most, MAX_TREE_NODES))
        if budget <= 0:
            return NO_DRAFT
        start = time.perf_counter()
        tree = self.drafter.propose(context, budget)
        self._draft_s = time.perf_counter() - start
        self._tree = tree.first(self._sizes.size(tree, self._draft_s))
        return self._tree

    def verified(self, nodes: Sequence[int], seconds: float, *, is_cut: bool) -> None:
        """See `Drafts`."""
        self._sizes.record(self._tree, nodes, seconds, is_cut=is_cut)
        self._total_draft_s += self._draft_s
        self._count(len(self._tree), len(nodes), seconds)

    def round_ended(self, accepted: Accepted, seconds: float) -> None:
        """See `Drafts`."""
        self._rounds.record(accepted, seconds)
        self._num_rounds += 1
        self._count(accepted.num_drafted, max(0, len(accepted.token_ids) - 1), seconds)

    def _count(self, num_drafted: int, num_accepted: int, seconds: float) -> None:
        self._counts[num_drafted] += 1
        if num_accepted:
            self._accepted.update(range(1, num_accepted + 1))
        self._total_verify_s += seconds

    def statistics(self) -> SpeculationStatistics:
        """Those of the request that `start` began."""
        steps = self._counts.total()
        deepest = max(self._accepted, default=0)
        return SpeculationStatistics(
            drafter=self.drafter.name,
            steps=steps,
            drafted_steps=steps - self._counts[0],
            drafted=sum(size * count for size, count in self._counts.items()),
            accepted_by_depth=tuple(self._accepted[depth] for depth in range(1, deepest + 1)),
            sizes=tuple(sorted((size, count) for size, count in self._counts.items() if count)),
            draft_s=self._total_draft_s,
            verify_s=self._total_verify_s,
            rounds=self._num_rounds,
        )
