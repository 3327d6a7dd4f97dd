"""Drafts what followed the last tokens where they occurred before: for text that repeats itself.

Of the context's last n tokens the longest run that occurred before counts, for n from `max_n` down to
`min_n`, and of its occurrences the `most_matches` latest. What followed them is a tree of continuations. Of N
occurrences that agree with a path of d − 1 tokens, a token that follows c of them has the probability

    c / (N + 10 / (n + d − 1)²),

which rises with the number of occurrences and with the length over which they agree with the context, and
leaves the rest for what was never seen. Of equal tokens the one that followed later comes first. An
occurrence that ends shortly before the context's end goes on with the path itself, so a loop is continued
without end.

The defaults were measured on our sources, pages and notes, split into words of at most six letters, with
drafts of 8 nodes. Runs of 1 to 4 gave 1.60 to 1.93 tokens a step, with the model's own. Runs of 2 to 4 or 2
to 6 gave only 1.38 to 1.69, and runs beyond 4 changed nothing. The probabilities above were within 0.1 of the
accepted shares over their whole range; without the square, those of short runs were twice too high.

Memory: at most 170 bytes a computed token for every n. That is 0.7 KB with the defaults (0.2 GB at 262,144
tokens), beside 20 KB of keys and values in the smallest of our models.
"""

from collections.abc import Sequence
from math import log
from typing import Any, Final

from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_builder import NO_CANDIDATES, Candidates, Path, build_tree

DOUBT: Final = 10.0  # see the formula above


class NgramDrafter:
    """A `Drafter` of one sequence. The context it is given decides; what it observed only says where to look.

    So a draft always is a continuation that is in the context, even if other tokens were observed.
    """

    def __init__(self, *, max_n: int = 4, min_n: int = 1, most_matches: int = 16) -> None:
        assert 1 <= min_n <= max_n, "the shortest run is of one token or more, and no longer than the longest"
        assert most_matches >= 1, "a draft needs an occurrence"
        self._orders = range(min_n, max_n + 1)
        self._most_matches = most_matches
        self._token_ids: list[int] = []
        self._num_indexed = 0  # tokens that the tables below have taken in
        # By hash of the last n tokens: the length of the sequence when they were last its end.
        self._latest: dict[int, int] = {}
        # By n and length: the length before at which the sequence had the same end, or 0.
        self._earlier: dict[int, list[int]] = {n: [0] for n in self._orders}

    @property
    def name(self) -> str:
        return "ngram"

    @property
    def wants_hidden(self) -> bool:
        return False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return ()

    def truncate(self, length: int) -> None:
        while self._num_indexed > length:
            for n in self._orders:
                earlier = self._earlier[n].pop()
                if self._num_indexed < n:
                    continue
                if earlier:
                    self._latest[self._hash(n, self._num_indexed)] = earlier
                else:
                    del self._latest[self._hash(n, self._num_indexed)]
            self._num_indexed -= 1
        del self._token_ids[length:]

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        self._token_ids += token_ids

    def _index(self) -> None:
        """Takes in all that was observed. Only before a draft, so that tokens without drafts cost nothing."""
        for end in range(self._num_indexed + 1, len(self._token_ids) + 1):
            for n in self._orders:
                if end < n:
                    self._earlier[n].append(0)
                    continue
                key = self._hash(n, end)
                self._earlier[n].append(self._latest.get(key, 0))
                self._latest[key] = end
        self._num_indexed = len(self._token_ids)

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """The tree described above. It looks at `most_matches` earlier ends for every n."""
        self._index()
        for n in reversed(self._orders):
            ends = self._matches(context, n)
            if ends:
                return build_tree(_Continuations(context, ends, n).after, budget)
        return NO_DRAFT

    def _hash(self, n: int, end: int) -> int:
        """Of the n tokens that end the first `end`."""
        return hash((n, *self._token_ids[end - n : end]))

    def _matches(self, context: Sequence[int], n: int) -> list[int]:
        """The lengths, descending, at which `context` has had its last n tokens as its end before."""
        last = tuple(context[-n:])
        end = self._latest.get(hash((n, *last)), 0)
        ends: list[int] = []
        for _ in range(self._most_matches):
            if not end:
                break
            # Not so if other tokens have the same hash, or if the context is not what was observed.
            if end < len(context) and tuple(context[end - n : end]) == last:
                ends.append(end)
            end = self._earlier[n][end]
        return ends


class _Continuations:
    """What follows the occurrences of a context's last n tokens, which end at `ends`, latest first."""

    def __init__(self, context: Sequence[int], ends: list[int], n: int) -> None:
        self._context = context
        self._n = n
        self._agreeing: dict[Path, list[int]] = {(): ends}

    def after(self, path: Path) -> Candidates:
        """The `Candidates` after a path: those after its parent have been asked for before."""
        ends = self._ends(path)
        counts: dict[int, int] = {}
        for end in ends:
            token_id = self._following(end, path, len(path))
            counts[token_id] = counts.get(token_id, 0) + 1
        if not counts:
            return NO_CANDIDATES
        ranked = sorted(counts.items(), key=lambda item: -item[1])  # stable: the later one stays first
        mass = len(ends) + DOUBT / (self._n + len(path)) ** 2
        return [token_id for token_id, _ in ranked], [log(count / mass) for _, count in ranked]

    def _ends(self, path: Path) -> list[int]:
        """Which occurrences go on with `path`."""
        if path not in self._agreeing:
            step = len(path) - 1
            before = self._agreeing[path[:-1]]
            self._agreeing[path] = [e for e in before if self._following(e, path, step) == path[-1]]
        return self._agreeing[path]

    def _following(self, end: int, path: Path, step: int) -> int:
        """The token `step` after an occurrence, of the context or, beyond its end, of the path."""
        at = end + step
        return self._context[at] if at < len(self._context) else path[at - len(self._context)]
