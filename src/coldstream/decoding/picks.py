"""Chooses tokens along draft trees whose rows one step has computed, as far as the tokens agree with a tree.

Every token is chosen from the logits after exactly the tokens before it, and a row's bits do not depend on
the rest of its tree. So the tokens are those of decoding without drafts at any temperature.
"""

import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar, overload

import numpy as np

from coldstream.decoding.choice import (
    Outcome,
    SampledToken,
    TokenChoice,
    TokenChooser,
    begin_choices,
    chosen_or_raised,
)
from coldstream.decoding.continuation import Continuation
from coldstream.decoding.device_logits import AnyLogits
from coldstream.decoding.token_tree import TokenTree

ROOT: Final = -1  # the node before all others of a tree
_Key = TypeVar("_Key", bound=Hashable)

Pick = Callable[[int, Sequence[int]], SampledToken]
"""The token after a node of a tree; `context`: all tokens so far. Asked from the root on, along a path."""


class TreeWalk:
    """A walk from the root of a tree along the tokens that are chosen."""

    def __init__(self, tree: TokenTree) -> None:
        self.rows: list[int] = []  # rows of the tree after which a token was chosen: the root's 0, then nodes
        self.accepted: list[int] = []  # nodes whose tokens were chosen and that were walked to
        self.is_truncated = True  # whether the nodes behind the last one were not tried
        self.choose_s = 0.0  # of choosing tokens
        self._tree = tree

    def take(self, tokens: Continuation, pick: Pick, vocab_size: int) -> Generator[SampledToken]:
        """Yields the tokens along the tree, which are appended to `tokens`, of which the root is the last.

        It ends behind the last node that agrees, or where generation ends. Closing the iterator early is
        allowed. Raises as `pick`, and then `rows` lacks the row of the failed choice; and as
        `Continuation.append`.
        """
        node = ROOT
        while True:
            start = time.perf_counter()
            chosen = pick(node, tokens.ids)
            self.choose_s += time.perf_counter() - start
            self.rows.append(1 + node)
            tokens.append(chosen.token_id, vocab_size)
            yield chosen
            following = self._tree.child(node, chosen.token_id)
            if following is None or tokens.has_ended:
                self.is_truncated = tokens.has_ended
                return
            node = following
            self.accepted.append(node)


def begin_all_picks(
    computed: Mapping[_Key, tuple[TokenChooser, Sequence[AnyLogits], TokenTree, Sequence[int]]],
) -> dict[_Key, Pick]:
    """Begins to choose the tokens along several draft trees of one step.

    computed: by key the chooser, the logits [vocab] after the root and each node, the tree, and all tokens up
    to the root. Where a device chooses, the tokens after all nodes are chosen at once, so that the host waits
    once. Otherwise, and where masks depend on a path that a grammar may not allow, a token is chosen when it
    is asked for. Raises the device's errors.
    """
    choices: list[TokenChoice] = []
    firsts: dict[_Key, int] = {}  # by choice on the device: the first with the same key
    for key, (chooser, rows, tree, context) in computed.items():
        is_near = isinstance(rows[0], np.ndarray) or chooser.needs_tokens
        if not is_near and chooser.choice(rows[0], context).is_on_device:
            firsts[key] = len(choices)
            choices += _choices_of(chooser, rows, tree, context)
    outcomes = begin_choices(choices).outcomes() if choices else []
    return {
        key: partial(_taken, outcomes, firsts[key]) if key in firsts else partial(_asked, chooser, rows)
        for key, (chooser, rows, _, _) in computed.items()
    }


def _choices_of(
    chooser: TokenChooser, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]
) -> list[TokenChoice]:
    """After the root and each node."""
    paths: list[list[int]] = []
    choices = [chooser.choice(rows[0], context)]
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        paths.append([*(paths[parent] if parent >= 0 else ()), token_id])
        choices.append(chooser.choice(rows[1 + node], _Extended(context, paths[node])))
    return choices


def _taken(outcomes: Sequence[Outcome], first: int, node: int, _: Sequence[int]) -> SampledToken:
    return chosen_or_raised(outcomes[first + 1 + node])


def _asked(chooser: TokenChooser, rows: Sequence[AnyLogits], node: int, path: Sequence[int]) -> SampledToken:
    return chooser(rows[1 + node], path)


class _Extended(Sequence[int]):
    """The tokens of `first`, then those of `last`; nothing is copied, as contexts are long."""

    def __init__(self, first: Sequence[int], last: Sequence[int]) -> None:
        self._first, self._last = first, last

    def __len__(self) -> int:
        return len(self._first) + len(self._last)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        behind = range(len(self))[index] - len(self._first)
        return self._last[behind] if behind >= 0 else self._first[behind]
