"""Sizes by cost where experts are missing: a step takes what the experts of all its rows take, fewer of which
are missing the longer a text is, and the first step of a shape is captured.
"""

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import pytest

from coldstream.decoding.draft_sizes import FixedSizes, SizesByCost, TreeSizes, TriedDraft
from coldstream.decoding.token_tree import TokenTree

NUM_TOKENS, MOST_NODES, CAPTURE_S = 450, 15, 0.16
BASE_MS = {1: 1.7, 2: 3.2, 4: 3.5, 8: 4.6, 16: 7.5}  # of a step without missing experts
MISSING_MS, COLD = 2.0, 0.3  # of the experts of one row, and how many times as many more are missing at first
# Distinct experts of tokens in a row, in those of one: as published, and where none are shared.
AS_PUBLISHED = {1: 1.0, 2: 1.62, 4: 2.64, 8: 3.96, 16: 5.53}
NOTHING = {1: 1.0, 16: 16.0}


@dataclass(frozen=True)
class Text:
    """right: chances of drafted tokens, given those before. flips: whether nothing is shared and little right
    in every other 64 tokens.
    """

    unions: Mapping[int, float]
    right: tuple[float, ...] = (0.8, 0.875, 0.9)
    flips: bool = False


@dataclass
class Machine:
    """captures_s: what the first step of so many rows takes more."""

    captures_s: float = 0.0
    used_rows: set[int] = field(default_factory=set)

    def step_s(self, rows: int, unions: Mapping[int, float], position: int) -> float:
        missing_ms = MISSING_MS * between(unions, rows) * (1 + COLD * math.exp(-position / 40))
        first_s = self.captures_s if rows > 1 and rows not in self.used_rows else 0.0
        self.used_rows.add(rows)
        return 1e-3 * (between(BASE_MS, rows) + missing_ms) + first_s


def between(known: Mapping[int, float], rows: int) -> float:
    after = next(each for each in known if each >= rows)
    before = max(each for each in known if each <= rows)
    share = (rows - before) / (after - before) if after > before else 0.0
    return known[before] + share * (known[after] - known[before])


def seconds_of(text: Text, sizes: TreeSizes, machine: Machine, seed: int) -> float:
    draws, taken_s, position = random.Random(seed), 0.0, 0
    while position < NUM_TOKENS:
        is_bad = text.flips and position // 64 % 2 == 1
        unions, right = (NOTHING, (0.3, 0.3)) if is_bad else (text.unions, text.right)
        budget, draft_s, num_nodes = min(sizes.budget(63), MOST_NODES), 0.0, 0
        chances = [*right, *[right[-1]] * MOST_NODES][:budget]
        logs = tuple(math.log(each) for each in accumulate(chances, mul))
        tree = TokenTree(tuple(range(budget)), tuple(range(-1, budget - 1)), logs)
        if budget:
            draft_s = 1e-3 * (0.4 + 0.2 * budget)
            (num_nodes,) = sizes.sizes([tree], draft_s)
        was_used = 1 + num_nodes in machine.used_rows
        step_s = machine.step_s(1 + num_nodes, unions, position) * math.exp(draws.gauss(0, 0.05))
        num_right = next((n for n in range(num_nodes) if draws.random() >= chances[n]), num_nodes)
        tried = [TriedDraft(tree.first(num_nodes), range(num_right))]
        sizes.record(tried, step_s, is_usual=was_used or not machine.captures_s)
        taken_s += draft_s + step_s
        position += 1 + num_right
    return taken_s / position


def speeds(text: Text, captures_s: float, num_texts: int) -> list[float]:
    """Of sizes by cost in texts one after the other, over plain steps; means of several runs."""
    runs = []
    for seed in range(5):
        sizes = SizesByCost("mtp", misses=True, first_use_s=captures_s)
        machine, turns = Machine(captures_s), [100 * seed + turn for turn in range(num_texts)]
        plain = [seconds_of(text, FixedSizes(0), Machine(), turn) for turn in turns]
        taken = [seconds_of(text, sizes, machine, turn) for turn in turns]
        runs.append([before / after for before, after in zip(plain, taken, strict=True)])
    return [statistics.mean(turn) for turn in zip(*runs, strict=True)]


@pytest.mark.parametrize("captures_s", [0.0, CAPTURE_S])
@pytest.mark.parametrize(
    "text",
    [Text(AS_PUBLISHED), Text(NOTHING), Text(AS_PUBLISHED, flips=True), Text(NOTHING, (0.3, 0.3))],
    ids=["as published", "nothing", "flips", "nothing right"],
)
def test_hardly_anything_is_lost_even_in_a_first_text(text: Text, captures_s: float) -> None:
    assert min(speeds(text, captures_s, 3)) >= 0.98


def test_drafts_are_used_where_neighbours_share_experts() -> None:
    assert statistics.mean(speeds(Text(AS_PUBLISHED), 0.0, 6)) >= 1.1


def test_captures_are_paid_once_they_were_saved_for() -> None:
    """Then drafts are used as if nothing had to be captured."""
    texts = speeds(Text(AS_PUBLISHED), CAPTURE_S / 8, 16)
    assert min(texts) >= 0.98
    assert statistics.mean(texts[-4:]) >= 1.1
