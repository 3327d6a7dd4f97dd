"""Builds the most likely draft tree of a given size from lists of candidates, best first (DDTree).

A *source* says which tokens may follow a path, with their conditional log-probabilities. The builder holds a
heap of the likeliest node of every list that is not used up. It takes the likeliest of all, then offers the
next node of that list and the first of the taken node's children. It knows neither models nor what a node
costs.

A path's log-probability is the sum along the path, in float64, from the root down; so no node is above its
parent or its earlier siblings. Of equal ones the shallower goes first, then the one of lower rank in its
list, then the one that was offered earlier.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coldstream.decoding.sampling import top_k_ids
from coldstream.decoding.sampling_params import Logits
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree

Path = tuple[int, ...]  # token ids from the root, which is not among them, down to a node
Candidates = tuple[Sequence[int], Sequence[float]]  # token ids and log-probabilities, likeliest first
Source = Callable[[Path], Candidates]
NO_CANDIDATES: Final[Candidates] = ((), ())


def build_tree(source: Source, budget: int, *, chain_first: bool = False) -> TokenTree:
    """The likeliest tree of at most `budget` nodes; fewer only if the source has no more. ≤ 0: NO_DRAFT.

    Nodes are in descending order of log-probability, so the first n of them are the tree for a budget of n.

    chain_first: the nodes begin with the greedy line, rank 0 at every depth as far as the source goes and the
    budget allows. The rest follow in descending order. The first n nodes are still the tree for a budget of
    n, but only the likeliest among those that have as much of the line as fits.

    A list from `source` ends before the first candidate that is not a probability above 0 (NaN, −inf,
    positive), or is likelier than the one before it. A token that its list already has is left out.

    `source` is asked at most once for a path, parents first, and only for nodes of the tree, while there is
    room for another. Raises what it raises.
    """
    if budget <= 0:
        return NO_DRAFT
    start = time.perf_counter()
    growing = _GrowingTree(source)
    if chain_first:
        growing.add_line(budget)
    while len(growing.token_ids) < budget and growing.add_likeliest():
        pass
    parts = (tuple(growing.token_ids), tuple(growing.parents), tuple(growing.log_probs))
    return TokenTree(*parts, build_s=time.perf_counter() - start - growing.source_s)


def marginal_source(token_ids: NDArray[np.integer], log_probs: NDArray[np.floating]) -> Source:
    """The source of a drafter whose candidates depend on the depth alone.

    token_ids, log_probs: [L, K], row d for depth d + 1, each row in descending order of log-probability.
    """
    rows = list(zip(token_ids.tolist(), log_probs.tolist(), strict=True))
    return lambda path: rows[len(path)] if len(path) < len(rows) else NO_CANDIDATES


def conditional_source(children: Callable[[int, int], Candidates], root_token: int) -> Source:
    """The source of a drafter whose candidates depend on the depth and on the token before.

    children(depth, parent_token): the candidates at `depth` (1: the children of the root) after that token;
    none beyond the drafter's depth. It is asked once for every pair.
    """
    known: dict[tuple[int, int], Candidates] = {}

    def source(path: Path) -> Candidates:
        key = len(path) + 1, path[-1] if path else root_token
        if key not in known:
            known[key] = children(*key)
        return known[key]

    return source


def top_log_probs(
    logits: Logits, k: int, temperature: float = 1.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The k likeliest tokens of every row of logits [n, V], and their log-probabilities: both [n, min(k, V)].

    Descending, of equal logits the lowest id first. log softmax(logits / temperature) over the whole
    vocabulary, in float64. A row whose largest logit is not finite gets NaN, which ends a list in
    `build_tree`. temperature: above 0.
    """
    assert temperature > 0, "candidates are ranked at a temperature above 0"
    num_rows, vocab_size = logits.shape
    k = max(0, min(k, vocab_size))
    token_ids = np.zeros((num_rows, k), np.int64)
    log_probs = np.full((num_rows, k), np.nan)
    for i, row in enumerate(logits):
        best = row.max(initial=-np.inf)
        if not np.isfinite(best):
            continue
        kept = top_k_ids(row, k)
        kept = kept[np.argsort(-row[kept], kind="stable")][:k]
        with np.errstate(over="ignore"):  # a very low temperature leaves the best alone
            scaled = (row.astype(np.float64) - np.float64(best)) / temperature
        token_ids[i] = kept
        log_probs[i] = scaled[kept] - np.log(np.exp(scaled).sum())
    return token_ids, log_probs


class _GrowingTree:
    """The nodes so far, and what may be added to them."""

    def __init__(self, source: Source) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.log_probs: list[float] = []
        self.source_s = 0.0  # seconds that the source took
        self._source = source
        self._paths: dict[int, Path] = {-1: ()}
        self._lists: dict[int, list[tuple[int, float]]] = {}  # by parent
        # (−log-probability, depth, rank, number of the offer, parent)
        self._offers: list[tuple[float, int, int, int, int]] = []
        self._num_offers = 0
        self._newest = -1  # the node whose children are not offered yet

    def add_line(self, most: int) -> None:
        """Add the greedy line, at most `most` nodes, and offer the second of every list on it."""
        while len(self.token_ids) < most and self._children(self._newest):
            self._add(self._newest, 0)
        for node in range(len(self.token_ids)):
            self._offer(node - 1, 1)

    def add_likeliest(self) -> bool:
        """Add the likeliest node; False if there is none."""
        # Only now, so that the source is never asked for what no budget has room for.
        self._offer(self._newest, 0)
        if not self._offers:
            return False
        _, _, rank, _, parent = heapq.heappop(self._offers)
        self._add(parent, rank)
        self._offer(parent, rank + 1)
        return True

    def _add(self, parent: int, rank: int) -> None:
        token_id, log_prob = self._children(parent)[rank]
        self._newest = len(self.token_ids)
        self._paths[self._newest] = (*self._paths[parent], token_id)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.log_probs.append(log_prob)

    def _offer(self, parent: int, rank: int) -> None:
        children = self._children(parent)
        if rank < len(children):
            depth = len(self._paths[parent]) + 1
            heapq.heappush(self._offers, (-children[rank][1], depth, rank, self._num_offers, parent))
            self._num_offers += 1

    def _children(self, parent: int) -> list[tuple[int, float]]:
        """Tokens and path log-probabilities of a node's children, by rank."""
        if parent not in self._lists:
            before = 0.0 if parent < 0 else self.log_probs[parent]
            start = time.perf_counter()
            found = self._source(self._paths[parent])
            self.source_s += time.perf_counter() - start
            usable = _usable(found)
            self._lists[parent] = [(token_id, before + log_prob) for token_id, log_prob in usable]
        return self._lists[parent]


def _usable(candidates: Candidates) -> list[tuple[int, float]]:
    """The candidates before the one that ends their list, without repeated tokens; see `build_tree`."""
    usable: dict[int, float] = {}
    last = 0.0
    for token_id, log_prob in zip(*candidates, strict=True):
        if not isfinite(log_prob) or log_prob > last:
            break
        last = log_prob
        usable.setdefault(int(token_id), float(log_prob))
    return list(usable.items())
