"""A radix tree over token ids: the prompts that were seen, and what is kept of their prefixes.

Unit of work: one path from the root of a namespace. A node is the end of a prefix. It has an entry, or it is
where prompts part, or it is a leaf that only remembers a prompt. Such leaves are bounded in number and
tokens, and those used longest ago are forgotten first. Tokens are compared, never hashes of them. Knows
nothing of sequences.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

Array = np.ndarray[Any, Any]
T = TypeVar("T")


@dataclass(eq=False)
class Node(Generic[T]):
    """The end of a prefix of `length` tokens. `tokens` are those after the parent's."""

    tokens: Array  # int32; empty for a root only
    length: int
    parent: "Node[T] | None"
    children: "dict[int, Node[T]]" = field(default_factory=dict)  # by first token
    entry: T | None = None

    @property
    def path(self) -> "Iterator[Node[T]]":
        """The node, its parent, and so on up to the root."""
        node: Node[T] | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def token_ids(self) -> Array:
        """All tokens of the prefix, int32."""
        return np.concatenate([node.tokens for node in self.path][::-1])


class PrefixTree(Generic[T]):
    """Prefixes by namespace. Callers set and remove entries, and call `tidy` after removing one."""

    def __init__(self, max_passed: int, max_passed_tokens: int) -> None:
        """Limits of the leaves without an entry: how many, and their own tokens together."""
        self._max_passed = max_passed
        self._max_passed_tokens = max_passed_tokens
        self._roots: dict[str, Node[T]] = {}
        self._passed: OrderedDict[Node[T], None] = OrderedDict()  # leaves without an entry, latest used last
        self.num_passed_tokens = 0

    def find(self, namespace: str, tokens: Array) -> tuple[list[Node[T]], int]:
        """The nodes that end prefixes of `tokens`, in order, and how many tokens the tree knows."""
        node = self._roots.get(namespace)
        found: list[Node[T]] = []
        matched = 0
        while node is not None and matched < len(tokens):
            child = node.children.get(int(tokens[matched]))
            if child is None:
                break
            common = _num_common(child.tokens, tokens[matched:])
            matched += common
            if common < len(child.tokens):
                break
            found.append(child)
            node = child
        return found, matched

    def nearest(self, namespace: str, tokens: Array) -> tuple[T | None, int]:
        """The entry with the most tokens in common with `tokens`, at its beginning, and how many they are."""
        found, matched = self.find(namespace, tokens)
        nodes = [(node, node.length) for node in found]
        last = found[-1] if found else self._roots.get(namespace)
        if last is not None and last.length < matched:
            nodes.append((last.children[int(tokens[last.length])], matched))
        for node, common in reversed(nodes):
            entry = node.entry or next(self.below(node), None)
            if entry is not None:
                return entry, common
        return None, 0

    def continuing(self, namespace: str, tokens: Array) -> list[T]:
        """Entries of prefixes that begin with all of `tokens`, or are those."""
        found, matched = self.find(namespace, tokens)
        if matched < len(tokens):
            return []
        node = found[-1] if found else self._roots[namespace]
        if node.length < matched:
            node = node.children[int(tokens[node.length])]
        return [*([] if node.entry is None else [node.entry]), *self.below(node)]

    def below(self, node: Node[T]) -> Iterator[T]:
        """Entries of longer prefixes."""
        return (each.entry for each in _below(node) if each.entry is not None)

    def remember(self, namespace: str, tokens: Array) -> None:
        """Remembers a prompt. May forget those of longest ago."""
        found, matched = self.find(namespace, tokens)
        if matched < len(tokens):
            self.tidy(self.insert(namespace, tokens))
        elif found and found[-1] in self._passed:
            self._passed.move_to_end(found[-1])

    def insert(self, namespace: str, tokens: Array) -> Node[T]:
        """The node of a prefix of at least one token, made if there is none.

        The caller has to give it an entry, or to `tidy` it.
        """
        found, matched = self.find(namespace, tokens)
        if matched == len(tokens) and found and found[-1].length == matched:
            return found[-1]
        node = found[-1] if found else self._root(namespace)
        if matched == len(tokens):
            return self._split(node, tokens, matched)
        if node.length < matched:
            node = self._split(node, tokens, matched)
        return self._extended(node, tokens)

    def set_entry(self, node: Node[T], entry: T) -> None:
        """Gives a node an entry."""
        self._leave(node)
        node.entry = entry

    def tidy(self, node: Node[T]) -> None:
        """Removes a node without an entry, unless prompts part there or it remembers a prompt."""
        if node.entry is not None or node.parent is None:
            return
        if not node.children:
            if node not in self._passed:
                self._enter(node)
            self._forget()
        elif len(node.children) == 1:
            self._merge(node)
            self._forget()

    def remove(self, namespace: str) -> list[T]:
        """Forgets a namespace. Returns its entries."""
        root = self._roots.pop(namespace, None)
        entries: list[T] = []
        for node in _below(root) if root else ():
            self._leave(node)
            if node.entry is not None:
                entries.append(node.entry)
        return entries

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(self._roots)

    @property
    def num_passed(self) -> int:
        """Leaves without an entry."""
        return len(self._passed)

    def nodes(self) -> Iterator[Node[T]]:
        """All nodes but the roots."""
        for root in self._roots.values():
            yield from _below(root)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        passed: set[Node[T]] = set()
        for root in self._roots.values():
            assert root.parent is None, "a root has a parent"
            assert root.length == len(root.tokens) == 0, "a root has tokens"
            assert root.entry is None, "a root has an entry"
            assert root.children, "a namespace is empty"
        for node in self.nodes():
            assert node.parent is not None, "a node has no parent"
            assert len(node.tokens) > 0, "a node adds no token"
            assert node.length == node.parent.length + len(node.tokens), "a node's length is not its path's"
            assert node.parent.children.get(int(node.tokens[0])) is node, "a child is under another token"
            assert node.entry is not None or len(node.children) != 1, "a node says nothing"
            if node.entry is None and not node.children:
                passed.add(node)
        assert passed == set(self._passed), "the leaves that passed are not those listed"
        assert self.num_passed_tokens == sum(len(node.tokens) for node in passed), "tokens are miscounted"
        assert len(passed) <= self._max_passed, "too many prompts are remembered"
        assert self.num_passed_tokens <= self._max_passed_tokens, "too many tokens are remembered"

    def _root(self, namespace: str) -> Node[T]:
        return self._roots.setdefault(namespace, Node(np.empty(0, np.int32), 0, None))

    def _extended(self, node: Node[T], tokens: Array) -> Node[T]:
        """The leaf of `tokens`, which begin with those of `node`: that itself, if it passed."""
        rest = tokens[node.length :]
        if node in self._passed:
            self._leave(node)
            node.tokens, node.length = np.concatenate([node.tokens, rest]), len(tokens)
            return node
        leaf: Node[T] = Node(rest.copy(), len(tokens), node)
        node.children[int(rest[0])] = leaf
        return leaf

    def _split(self, parent: Node[T], tokens: Array, length: int) -> Node[T]:
        """A node at `length`, in the middle of the edge below `parent` that `tokens` follow."""
        below = parent.children[int(tokens[parent.length])]
        count = length - parent.length
        was_passed = below in self._passed
        self._leave(below, keeps_place=was_passed)
        middle: Node[T] = Node(below.tokens[:count].copy(), length, parent)
        below.tokens, below.parent = below.tokens[count:].copy(), middle
        parent.children[int(middle.tokens[0])] = middle
        middle.children[int(below.tokens[0])] = below
        if was_passed:
            self.num_passed_tokens += len(below.tokens)
        return middle

    def _merge(self, node: Node[T]) -> None:
        """Makes the only child of `node` that of its parent."""
        ((_, child),) = node.children.items()
        assert node.parent is not None
        if child in self._passed:
            self.num_passed_tokens += len(node.tokens)
        child.tokens = np.concatenate([node.tokens, child.tokens])
        child.parent = node.parent
        node.parent.children[int(child.tokens[0])] = child

    def _enter(self, leaf: Node[T]) -> None:
        self._passed[leaf] = None
        self.num_passed_tokens += len(leaf.tokens)

    def _leave(self, node: Node[T], *, keeps_place: bool = False) -> None:
        if node in self._passed:
            self.num_passed_tokens -= len(node.tokens)
            if not keeps_place:
                del self._passed[node]

    def _forget(self) -> None:
        while len(self._passed) > self._max_passed or self.num_passed_tokens > self._max_passed_tokens:
            leaf = next(iter(self._passed))
            self._leave(leaf)
            parent = leaf.parent
            assert parent is not None
            del parent.children[int(leaf.tokens[0])]
            if parent.parent is not None:
                self.tidy(parent)
            elif not parent.children:
                self._roots = {name: root for name, root in self._roots.items() if root is not parent}


def _below(root: Node[T]) -> Iterator[Node[T]]:
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def _num_common(first: Array, second: Array) -> int:
    """How many tokens both begin with."""
    count = min(len(first), len(second))
    different = first[:count] != second[:count]
    return int(different.argmax()) if different.any() else count
