"""The speculative loop: one step computes the last token and a draft of what may follow it, and tokens are
chosen along the draft as far as they agree with it.

Every token is chosen from the logits after exactly the tokens before it, and a row's bits do not depend on
the rest of its tree. So the tokens are those of the plain loop at any temperature, whatever was drafted, and
a draft decides only how many of them one step gives.
"""

import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, overload

import numpy as np

from coldstream.decoding.ahead import AheadModel, BeginToken, continue_ahead
from coldstream.decoding.autoregressive import Continuation
from coldstream.decoding.choice import Choice, Chosen, Outcome, TokenChooser, begin_choices, chosen_or_raised
from coldstream.decoding.device_logits import AnyLogits
from coldstream.decoding.rounds import BeginRounds, generate_in_rounds
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.kernels.rounds.reference import Accepted

ROOT = -1  # the node before all others of a tree
_Key = TypeVar("_Key", bound=Hashable)


class DraftModel(Protocol):
    """A model, with one sequence, that computes draft trees."""

    def verify(self, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[AnyLogits]:
        """Compute a tree after the tokens that it holds; logits [vocab] after each row, until the next call.

        parents: by row an earlier row, or −1. `commit` has to follow.
        """

    def commit(self, rows: Sequence[int]) -> None:
        """Hold this path of the tree, and forget its other rows."""


class TreeModel(DraftModel, AheadModel, Protocol):
    """One that computes chains as well. Without `begin_ahead` it is not asked for what `AheadModel` has."""

    def append(self, token_ids: Sequence[int]) -> AnyLogits:
        """Compute tokens after those that it holds; logits [vocab] after the last, until the next call."""


class TriedDrafts(Protocol):
    """Is told what came of drafts."""

    def verified(self, nodes: Sequence[int], seconds: float, choose_s: float, *, is_cut: bool) -> None:
        """The path of the last draft that was accepted, and the time of computing, choosing and committing.

        choose_s: of this, that of choosing. is_cut: whether generation ended along the path, so that what
        follows its last node was not tried.
        """


class Drafts(TriedDrafts, Protocol):
    """Says what is drafted before each step as well."""

    def will_draft(self, most: int) -> bool:
        """Whether `draft` would ask a drafter for `most` nodes: the tokens before them need not be known."""

    def draft(self, context: Sequence[int], most: int) -> TokenTree:
        """At most `most` nodes (≥ 0) after `context`: the tokens that the model holds, then the root."""

    def num_together(self) -> int:
        """How many steps, the next one first, have no drafts and may be told of together."""

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool) -> None:
        """So many steps without nodes took so long together: more than one only if `num_together` said so.

        is_usual: whether steps without drafts that follow each other take as long.
        """

    def rests(self) -> bool:
        """Whether a device that drafts by itself is not to for now. What is said and told after a True is of
        steps without drafts, until `will_draft` says that it may again.
        """

    def begin_rounds(self) -> None:
        """A device begins to draft by itself. Rounds before that were not told are none of these."""

    def next_round(self) -> int:
        """How many tokens a device is to draft in the next round that it runs by itself."""

    def round_ended(self, accepted: Accepted, seconds: float) -> None:
        """What came of the first round that was not told yet, and how long it took."""


Pick = Callable[[int, Sequence[int]], Chosen]
"""The token after a node of a tree; `context`: all tokens so far. Asked from the root on, along a path."""

Begin = Callable[[Sequence[AnyLogits], TokenTree, Sequence[int]], Pick]
"""Begins to choose the tokens after the root and each node of a tree, from the logits after each; `context`:
the tokens up to the root.
"""


def generate_tokens_speculatively(
    model: TreeModel,
    logits: AnyLogits,
    prompt_ids: Sequence[int],
    begin: Begin,
    drafts: Drafts,
    *,
    end_ids: frozenset[int],
    max_tokens: int,
    begin_ahead: BeginToken | None = None,
    begin_rounds: BeginRounds | None = None,
) -> Iterator[Chosen]:
    """Yield the tokens that `generate_tokens` yields, with their log-probabilities.

    begin_ahead: where the device makes all choices; then steps are launched ahead while nothing is drafted.
    begin_rounds: called after the first token, and again where drafts have rested; if there are rounds, the
    other tokens come from them.

    The model holds the prompt, and `logits` [vocab] follow it. No row is computed that would exceed the
    positions of `max_tokens` tokens.

    When this iterator ends or is closed, the model holds the prompt and every yielded token but the last, as
    after the plain loop; with steps launched ahead as after `generate_tokens_ahead`. If the token after a row
    of a draft cannot be chosen, that row is not held. Raises as `generate_tokens`.
    """
    vocab_size = len(logits)
    tokens = Continuation(prompt_ids, end_ids=end_ids, max_tokens=max_tokens)
    chosen = begin([logits], NO_DRAFT, tokens.ids)(ROOT, tokens.ids)
    tokens.append(chosen.token_id, vocab_size)
    yield chosen
    while not tokens.has_ended:
        rests = begin_rounds is not None and drafts.rests()
        if begin_rounds is not None and not rests:
            rounds = begin_rounds(tokens.ids, tokens.num_left)
            if rounds is not None:
                yield from generate_in_rounds(rounds, tokens, drafts, vocab_size)
                continue
            begin_rounds = None  # this text has none
        tree = NO_DRAFT if rests else drafts.draft(tokens.ids, tokens.num_left - 1)
        if tree:
            yield from verify_draft(model, tokens, tree, begin, drafts, vocab_size)
            continue
        yield from _plain_steps(model, tokens, begin, begin_ahead, drafts, end_ids)


def _plain_steps(
    model: TreeModel,
    tokens: Continuation,
    begin: Begin,
    begin_ahead: BeginToken | None,
    drafts: Drafts,
    end_ids: frozenset[int],
) -> Generator[Chosen]:
    """A step without nodes, and those that can follow it until something is drafted, launched ahead where the
    device makes all choices.

    What others do with a token counts for no step. It makes a step that runs meanwhile shorter by as much as
    a step with a draft, which does not run meanwhile, is longer than it is said to be.
    """
    if begin_ahead is None:
        yield from _steps_together(model, tokens, begin, drafts)
        return
    start = time.perf_counter()
    logits = model.append(tokens.ids[-1:])

    def may_launch() -> bool:
        return not drafts.will_draft(tokens.num_left - 2)

    for token_id, is_between in continue_ahead(model, logits, tokens, begin_ahead, end_ids, may_launch):
        drafts.went_on(1, time.perf_counter() - start, is_usual=is_between)
        yield Chosen(token_id)
        start = time.perf_counter()


def _steps_together(
    model: TreeModel, tokens: Continuation, begin: Begin, drafts: Drafts
) -> Generator[Chosen]:
    """A step without nodes, and as many after it as may be told of together."""
    most, num_steps, seconds = max(1, drafts.num_together()), 0, 0.0
    try:
        while num_steps < most and not tokens.has_ended:
            start = time.perf_counter()
            logits = model.append(tokens.ids[-1:])
            chosen = begin([logits], NO_DRAFT, tokens.ids)(ROOT, tokens.ids)
            seconds, num_steps = seconds + time.perf_counter() - start, num_steps + 1
            tokens.append(chosen.token_id, len(logits))
            yield chosen
    finally:
        if num_steps:
            drafts.went_on(num_steps, seconds, is_usual=True)


def verify_draft(
    model: DraftModel,
    tokens: Continuation,
    tree: TokenTree,
    begin: Begin,
    drafts: TriedDrafts,
    vocab_size: int,
) -> Generator[Chosen]:
    """Compute the last of `tokens` and a draft that is not empty, and yield the tokens along it, which are
    appended to `tokens`.

    The model holds all tokens but the last, now and when this iterator ends or is closed.
    """
    start = time.perf_counter()
    parents = (ROOT, *(1 + parent for parent in tree.parents))
    rows = model.verify((tokens.ids[-1], *tree.token_ids), parents)
    nodes, held = [ROOT], []
    seconds, choose_s, is_cut = time.perf_counter() - start, 0.0, True
    try:
        start = time.perf_counter()
        pick = begin(rows, tree, tokens.ids)
        while True:
            chosen = pick(nodes[-1], tokens.ids)
            choose_s += time.perf_counter() - start
            held.append(1 + nodes[-1])
            tokens.append(chosen.token_id, vocab_size)
            yield chosen
            node = tree.child(nodes[-1], chosen.token_id)
            if node is None or tokens.has_ended:
                is_cut = tokens.has_ended
                return
            nodes.append(node)
            start = time.perf_counter()
    finally:
        start = time.perf_counter()
        model.commit(held)
        seconds += choose_s + time.perf_counter() - start
        drafts.verified(nodes[1:], seconds, choose_s, is_cut=is_cut)


def begin_picks(
    chooser: TokenChooser, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]
) -> Pick:
    """A `Begin` by a chooser: see `begin_all_picks`."""
    return begin_all_picks({None: (chooser, rows, tree, context)})[None]


def begin_all_picks(
    computed: Mapping[_Key, tuple[TokenChooser, Sequence[AnyLogits], TokenTree, Sequence[int]]],
) -> dict[_Key, Pick]:
    """What `Begin` is to give for each of several trees of one step, the chooser of each first: all tokens at
    once where a device chooses, which the host then waits for once; otherwise only those that are asked for.

    Raises the device's errors.
    """
    choices: list[Choice] = []
    firsts: dict[_Key, int] = {}  # of the choices on the device
    for key, (chooser, rows, tree, context) in computed.items():
        if not isinstance(rows[0], np.ndarray) and chooser.choice(rows[0], context).is_on_device:
            firsts[key] = len(choices)
            choices += _choices_of(chooser, rows, tree, context)
    outcomes = begin_choices(choices).outcomes() if choices else []
    return {
        key: partial(_taken, outcomes, firsts[key]) if key in firsts else partial(_asked, chooser, rows)
        for key, (chooser, rows, _, _) in computed.items()
    }


def _choices_of(
    chooser: TokenChooser, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]
) -> list[Choice]:
    """After the root and each node."""
    paths: list[list[int]] = []
    choices = [chooser.choice(rows[0], context)]
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        paths.append([*(paths[parent] if parent >= 0 else ()), token_id])
        choices.append(chooser.choice(rows[1 + node], _Extended(context, paths[node])))
    return choices


def _taken(outcomes: Sequence[Outcome], first: int, node: int, _: Sequence[int]) -> Chosen:
    return chosen_or_raised(outcomes[first + 1 + node])


def _asked(chooser: TokenChooser, rows: Sequence[AnyLogits], node: int, path: Sequence[int]) -> Chosen:
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
