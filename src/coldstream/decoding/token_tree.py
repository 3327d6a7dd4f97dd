"""A draft: tokens that may follow a sequence, as a tree. A chain is a tree with one child a node."""

from dataclasses import dataclass, field
from typing import Final, Self


@dataclass(frozen=True)
class TokenTree:
    """Nodes after a root, which is the last token of the sequence and not one of them.

    parents[i] is an earlier node, or −1 for the root. log_probs[i] is the drafter's log-probability of the
    path from the root to node i, never above that of its parent. Where the drafter can order them, nodes
    descend in it, so that the first nodes are the best smaller tree. No node has two children with the same
    token. build_s: the seconds that putting it together took, besides asking what may follow; trees are equal
    whatever it was.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    build_s: float = field(default=0.0, compare=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> tuple[int, ...]:
        """By node: 1 for a child of the root, and so on."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def first(self, count: int) -> Self:
        """The tree of the first `count` nodes."""
        parts = (self.token_ids[:count], self.parents[:count], self.log_probs[:count])
        return type(self)(*parts, build_s=self.build_s)

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` (−1: the root) with this token."""
        pairs = zip(self.parents, self.token_ids, strict=True)
        return next((i for i, pair in enumerate(pairs) if pair == (node, token_id)), None)


NO_DRAFT: Final = TokenTree()
