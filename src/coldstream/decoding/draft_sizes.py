"""How much is drafted for a step, and how much of it is verified: a fixed number of nodes, or what pays."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import ClassVar, Protocol

from coldstream.decoding.acceptance import AcceptanceModel
from coldstream.decoding.backoff import OBSERVED_STEPS, Backoff
from coldstream.decoding.fused_sizes import FixedFusedSizes, FusedSizes, FusedSizesByCost
from coldstream.decoding.loss_bound import LossBound
from coldstream.decoding.row_times import RowTimes, row_range
from coldstream.decoding.token_tree import TokenTree
from coldstream.decoding.tree_size import SizePolicy, SizeReason, TreeSize


@dataclass(frozen=True)
class TriedDraft:
    """A draft of which a step verified all nodes."""

    tree: TokenTree
    accepted: Sequence[int]  # nodes, a path from the root
    is_truncated: bool = (
        False  # whether generation ended along the path, so that what follows it was not tried
    )


class TreeSizes(Protocol):
    """Chooses how much is drafted and how much of it is verified, for one sequence or several in a step."""

    @property
    def drafts_beside_prompts(self) -> bool:
        """Whether it chooses for steps that have rows of prompts too."""

    def will_draft(self, most: int, num_sequences: int = 1) -> bool:
        """Whether `budget` would ask for a node. Steps under way need not be recorded."""

    def budget(self, most: int, num_sequences: int = 1) -> int:
        """Nodes that the drafter of each sequence is asked for, at most `most`; 0: the next step is plain."""

    def is_idle(self, num_sequences: int = 1) -> bool:
        """Whether nothing will be drafted for long where so many run: drafters need not observe tokens."""

    @property
    def fused(self) -> FusedSizes:
        """The sizes where a device drafts and accepts by itself."""

    def sizes(self, trees: Sequence[TokenTree], draft_s: float) -> list[int]:
        """How many of the first nodes of each sequence's tree are verified; all took `draft_s` seconds."""

    @property
    def reason(self) -> SizeReason:
        """Why the first step that is not recorded has the sizes that `budget` and `sizes` said."""

    def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
        """What came of the drafts of each sequence of a step that `budget` was asked for, which took so long
        besides drafting.

        is_usual: whether others with as many nodes take as long; without any, those that follow each other.
        """


@dataclass(frozen=True)
class FixedSizes:
    """Trees of `num_nodes` nodes, whatever they cost."""

    num_nodes: int
    drafts_beside_prompts: ClassVar[bool] = True
    reason: ClassVar[SizeReason] = SizeReason.FIXED

    @property
    def fused(self) -> FusedSizes:
        return FixedFusedSizes(self.num_nodes)

    def will_draft(self, most: int, num_sequences: int = 1) -> bool:
        return self.budget(most) > 0

    def budget(self, most: int, num_sequences: int = 1) -> int:
        return min(self.num_nodes, most)

    def is_idle(self, num_sequences: int = 1) -> bool:
        return False

    def sizes(self, trees: Sequence[TokenTree], draft_s: float) -> list[int]:
        return [len(tree) for tree in trees]

    def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
        pass


class SizesByCost:
    """Trees of as many nodes as are expected to be worth most for their time. Acceptance and step times so
    far decide; see `tree_size.py` and `acceptance.py`.

    Of several sequences' trees the likeliest nodes come first, whichever tree they are in. What pays is
    learned apart for one sequence, two, three and so on, by the ranges of `row_times.py`.

    Observing tokens costs a drafter time too. A drafter whose next draft is more than 64 steps away observes
    none. Once drafts have not paid for 512 steps, it is asked in 512 of 4,096 steps only.

    is_bounded: whether what drafts lose is bounded, by `LossBound`. misses: whether experts may be missing in
    fast memory; it is bounded then too. first_use_s: what the first step of a shape takes more than others.
    """

    # The time of steps with prompts says nothing of other steps.
    drafts_beside_prompts: ClassVar[bool] = False

    def __init__(
        self, drafter_name: str, *, is_bounded: bool = False, misses: bool = False, first_use_s: float = 0.0
    ) -> None:
        self.fused: FusedSizes = FusedSizesByCost()
        self._name, self.is_bounded = drafter_name, is_bounded or misses
        self._misses, self._first_use_s = misses, first_use_s
        self._acceptance = AcceptanceModel()
        self._learned: dict[int, _Learned] = {}  # by range of sequences
        self.reason = SizeReason.NOT_ASKED

    def will_draft(self, most: int, num_sequences: int = 1) -> bool:
        return most > 0 and self._of(num_sequences).num_plain(num_sequences) == 0

    def budget(self, most: int, num_sequences: int = 1) -> int:
        learned = self._of(num_sequences)
        learned.chosen, self.reason = None, SizeReason.NOT_ASKED
        if not self.will_draft(most, num_sequences):
            return 0
        return learned.policy.num_asked(most, num_sequences)

    def is_idle(self, num_sequences: int = 1) -> bool:
        return self._of(num_sequences).num_plain(num_sequences) > OBSERVED_STEPS

    def sizes(self, trees: Sequence[TokenTree], draft_s: float) -> list[int]:
        expected = [self._acceptance.expected(self._name, tree) for tree in trees]
        order = list(_likeliest_first(expected))
        learned = self._of(len(trees))
        chosen = learned.policy.choose([expected[tree][node] for tree, node in order], draft_s, len(trees))
        counts = Counter(tree for tree, _ in order[: chosen.num_nodes])
        learned.chosen, self.reason = chosen, chosen.reason
        return [counts[tree] for tree in range(len(trees))]

    def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
        learned = self._of(len(drafts))
        tokens = len(drafts) + sum(len(draft.accepted) for draft in drafts)
        learned.policy.record(seconds, learned.chosen, float(tokens), len(drafts), is_usual=is_usual)
        learned.lose_step()
        self.reason = SizeReason.NOT_ASKED
        for draft in drafts:
            if not draft.is_truncated:
                self._acceptance.record(self._name, draft.tree, draft.accepted)

    def _of(self, num_sequences: int) -> "_Learned":
        size = row_range(num_sequences)
        if size not in self._learned:  # asked in every step, and made of many objects
            bound = LossBound(self._first_use_s) if self.is_bounded else None
            self._learned[size] = _Learned(SizePolicy(RowTimes(), bound=bound, misses=self._misses))
        return self._learned[size]


class _Learned:
    """Of steps with about as many sequences."""

    def __init__(self, policy: SizePolicy) -> None:
        self.policy = policy
        self.chosen: TreeSize | None = None  # for the next step
        self._backoff = Backoff()

    def num_plain(self, num_sequences: int) -> int:
        """How many steps, the next one first, have no draft."""
        return max(self._backoff.num_steps, self.policy.num_plain(num_sequences))

    def lose_step(self) -> None:
        """A step went by, and drafts may not have paid since."""
        self._backoff.went_by(1, has_gained=self.policy.has_gained)


def _likeliest_first(expected: Sequence[Sequence[float]]) -> Iterator[tuple[int, int]]:
    """All nodes as (tree, node), merged by probability. Each tree keeps its own order; of equal nodes the
    first tree's comes first.
    """
    heads = [(-nodes[0], tree, 0) for tree, nodes in enumerate(expected) if nodes]
    heapify(heads)
    while heads:
        _, tree, node = heads[0]
        yield tree, node
        if node + 1 < len(expected[tree]):
            heapreplace(heads, (-expected[tree][node + 1], tree, node + 1))
        else:
            heappop(heads)
