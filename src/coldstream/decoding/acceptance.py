"""How likely the nodes of a draft are to be accepted, learned from the drafts of the same drafter before.

A drafter's own probabilities are a start, but its confidence is not ours: the model samples from another
distribution, and drafters are off by depth. So the shares of accepted nodes are counted. A *trial* is a node
whose parent was accepted; it is a hit if it was accepted as well. Trials are counted by drafter, depth and
conditional probability (the drafter's, given the parent), and once more for all depths together.

The estimate for a node of conditional probability p, from hits h of trials t at its depth and H of T at all:

    (h + 8 r) / (t + 8)    with    r = (H + 8 p) / (T + 8),

so that a new drafter is believed, and depths that are rarely reached follow the others. Evidence loses 1 /
`memory` of its weight with every step with a draft, and a sixteenth of that with every other. So an estimate
that stopped all drafting returns to the drafter's own in some thousand steps, and is tested again.

All is a pure function of the calls so far. Memory is bounded: 14 ranges of probability at 17 depths a
drafter.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Final

from coldstream.decoding.token_tree import TokenTree

_EDGES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_DEEPEST: Final = 16  # deeper nodes count as this deep
_ALL_DEPTHS: Final = 0
_PRIOR_TRIALS: Final = 8.0
_PLAIN_STEP: Final = 1 / 16  # weight of a plain step, as a share of a step with a draft


class AcceptanceModel:
    """The shares of accepted nodes of any number of drafters, by their names.

    memory: in steps with drafts.
    """

    def __init__(self, memory: float = 256.0) -> None:
        assert memory > 1, "a step keeps some of the evidence before it"
        self._kept = 1.0 - 1.0 / memory
        self._shares: dict[tuple[str, int, int], _Share] = {}
        self._num_steps: dict[str, float] = {}

    def expected(self, drafter: str, tree: TokenTree) -> tuple[float, ...]:
        """By node: the probability that it is accepted, and with it the path to it.

        At most that of its parent. Only one of several siblings can be accepted, so together they have at
        most their parent's; the earlier ones come first. The first n are those of the tree's first n nodes.
        """
        by_node: list[float] = []
        left: dict[int, float] = {}  # by parent: what is left of its own probability
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            before = 1.0 if parent < 0 else by_node[parent]
            available = left.get(parent, before)
            given_parent = self._given_parent(drafter, depth, _conditional(tree, node))
            by_node.append(min(before * given_parent, available))
            left[parent] = available - by_node[node]
        return tuple(by_node)

    def record(self, drafter: str, tree: TokenTree, accepted: Sequence[int]) -> None:
        """A step has verified `tree`, NO_DRAFT included, and accepted these nodes: a path from the root.

        Not for a step in which generation ended on an accepted node, whose children have not been tried.
        """
        now = self._num_steps.get(drafter, 0.0) + (1.0 if tree else _PLAIN_STEP)
        self._num_steps[drafter] = now
        parents = [-1, *accepted]
        assert all(tree.parents[node] == parent for node, parent in zip(accepted, parents, strict=False)), (
            "accepted nodes are a path from the root"
        )
        depth_below = {parent: depth for depth, parent in enumerate(parents, 1)}
        hits = set(accepted)
        for node, parent in enumerate(tree.parents):
            if parent not in depth_below:
                continue
            for depth in (min(depth_below[parent], _DEEPEST), _ALL_DEPTHS):
                key = drafter, depth, _score(_conditional(tree, node))
                share = self._shares.get(key, _NO_SHARE).at(now, self._kept)
                self._shares[key] = _Share(share.hits + (node in hits), share.trials + 1.0, now)

    def _given_parent(self, drafter: str, depth: int, probability: float) -> float:
        """The estimate of the module's docstring."""
        now, score = self._num_steps.get(drafter, 0.0), _score(probability)
        for cell in (_ALL_DEPTHS, min(depth, _DEEPEST)):
            share = self._shares.get((drafter, cell, score), _NO_SHARE).at(now, self._kept)
            probability = (share.hits + _PRIOR_TRIALS * probability) / (share.trials + _PRIOR_TRIALS)
        return probability


@dataclass(frozen=True)
class _Share:
    """Weighted hits and trials, as of a step."""

    hits: float
    trials: float
    step: float

    def at(self, step: float, kept: float) -> "_Share":
        """What is left of it at a later step."""
        weight = kept ** (step - self.step)
        return _Share(self.hits * weight, self.trials * weight, step)


_NO_SHARE: Final = _Share(0.0, 0.0, 0.0)


def _conditional(tree: TokenTree, node: int) -> float:
    """The drafter's probability of a node given its parent; 0 if what it says is not a number."""
    parent = tree.parents[node]
    log_prob = tree.log_probs[node] - (0.0 if parent < 0 else tree.log_probs[parent])
    return exp(min(log_prob, 0.0)) if log_prob == log_prob else 0.0


def _score(probability: float) -> int:
    """The number of the range that a probability is in."""
    return bisect_right(_EDGES, probability)
