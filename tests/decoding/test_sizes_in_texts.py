"""Sizes by cost against all fixed ones in simulated texts, by what steps and drafts take and how often drafts
are right.
"""

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from coldstream.decoding.draft_sizes import FixedSizes, SizesByCost, TreeSizes, TriedDraft
from coldstream.decoding.token_tree import TokenTree

MOST_NODES, NUM_TOKENS, SEEDS = 16, 900, range(7)


@dataclass(frozen=True)
class Machine:
    """step_ms: by rows. draft_ms: of any draft, and of each node. after_ms: what a plain step after a draft
    takes more. noise: of a step, as a share of it.
    """

    step_ms: Mapping[int, float]
    draft_ms: tuple[float, float]
    after_ms: float = 0.0
    noise: float = 0.05

    def step_s(self, rows: int) -> float:
        known = sorted(self.step_ms)
        after = next(each for each in known if each >= rows)
        before = max((each for each in known if each <= rows), default=after)
        share = (rows - before) / (after - before) if after > before else 0.0
        return 1e-3 * (self.step_ms[before] + share * (self.step_ms[after] - self.step_ms[before]))


@dataclass(frozen=True)
class Text:
    """right: how likely a node is to be accepted, given the one before it. hard: the same where the text is
    hard to draft; easy and hard stretches are ten drafts long.
    """

    right: float
    hard: float | None = None


RESIDENT = {1: 1.7, 2: 2.65, 4: 3.25, 5: 3.5, 9: 5.0, 17: 7.7}
MISSING = {1: 7.0, 2: 11.0, 4: 16.0, 5: 18.0, 9: 27.0, 17: 41.0}
CPU = {1: 1.0, 2: 1.5, 4: 2.1, 5: 2.4, 9: 3.6, 17: 6.0}
BY_NODE, AT_ONCE = (0.26, 0.17), (0.8, 0.0)
# The full-size model with 12 layers and the demo model on two cores, and their blocks, in plain steps.
LAYERS, BY_LAYERS = {1: 1.0, 2: 1.45, 3: 1.75, 4: 2.0, 5: 2.2, 6: 2.6, 8: 3.1, 17: 6.3}, (0.03, 0.15)
DEMO, BY_DEMO = {1: 1.0, 2: 1.9, 3: 2.4, 4: 2.9, 5: 3.4, 9: 4.5, 17: 7.0}, (0.1, 0.25)


def seconds_per_token(machine: Machine, text: Text, sizes: TreeSizes, seed: int) -> float:
    """Of one text; `sizes` learns from it."""
    draws, taken_s, num_tokens, is_easy, was_drafted = random.Random(seed), 0.0, 0, True, False
    while num_tokens < NUM_TOKENS:
        budget = min(sizes.budget(63), MOST_NODES)
        if text.hard is not None and draws.random() < 0.1:
            is_easy = not is_easy
        right = text.right if is_easy or text.hard is None else text.hard
        tree, draft_s, num_nodes = chain(budget, right), 0.0, 0
        if budget:
            draft_s = 1e-3 * (machine.draft_ms[0] + machine.draft_ms[1] * budget)
            (num_nodes,) = sizes.sizes([tree], draft_s)
        step_s = machine.step_s(1 + num_nodes) * math.exp(draws.gauss(0, machine.noise))
        step_s += 1e-3 * machine.after_ms * (was_drafted and not num_nodes)
        was_drafted = budget > 0
        num_right = next((n for n in range(num_nodes) if draws.random() >= right), num_nodes)
        sizes.record([TriedDraft(tree.first(num_nodes), range(num_right))], step_s)
        taken_s += draft_s + step_s
        num_tokens += 1 + num_right
    return taken_s / num_tokens


def chain(num_nodes: int, right: float) -> TokenTree:
    log_probs = tuple(math.log(right) * (1 + node) for node in range(num_nodes))
    return TokenTree(tuple(range(num_nodes)), tuple(range(-1, num_nodes - 1)), log_probs)


def speeds(machine: Machine, text: Text) -> tuple[float, float]:
    """Of sizes by cost in a first and two further texts: over plain steps; and over the best fixed size."""
    fixed = {
        size: statistics.mean(seconds_per_token(machine, text, FixedSizes(size), seed) for seed in SEEDS)
        for size in (0, 1, 2, 3, 4, 6, 8, 12, 16)
    }
    taken = []
    for seed in SEEDS:
        sizes = SizesByCost("mtp")
        taken += [seconds_per_token(machine, text, sizes, seed + 1000 * turn) for turn in range(3)]
    return fixed[0] / statistics.mean(taken), min(fixed.values()) / statistics.mean(taken)


@pytest.mark.parametrize(
    ("machine", "text", "least"),
    [
        (Machine(RESIDENT, BY_NODE, 0.35), Text(0.85), 0.96),
        (Machine(RESIDENT, BY_NODE, 0.35), Text(0.95, 0.4), 0.93),
        (Machine(RESIDENT, AT_ONCE, 0.35), Text(0.95, 0.4), 1.0),
        (Machine(RESIDENT, (0.02, 0.0), 0.35), Text(0.95, 0.1), 1.15),
        (Machine(MISSING, BY_NODE, 0.35, noise=0.15), Text(0.85), 0.95),
        (Machine(CPU, (0.1, 0.1)), Text(0.85), 0.95),
        (Machine(CPU, (0.02, 0.0)), Text(0.9, 0.1), 1.0),
    ],
)
def test_sizes_by_cost_are_about_as_fast_as_the_best_fixed_one(
    machine: Machine, text: Text, least: float
) -> None:
    """And faster where the text varies: no fixed size is best in all of it."""
    over_plain, over_best = speeds(machine, text)
    assert over_best >= least
    assert over_plain >= 1.1


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (Machine(CPU, (0.2, 0.15)), Text(0.55)),
        (Machine(CPU, (0.2, 0.15)), Text(0.05)),
        (Machine(CPU, AT_ONCE), Text(0.3)),
        (Machine({1: 3.3, 2: 6.6, 4: 9.9, 5: 11.0, 9: 16.3, 17: 24.0}, BY_NODE, 0.35, noise=0.2), Text(0.8)),
    ],
)
def test_where_drafts_do_not_pay_little_is_lost(machine: Machine, text: Text) -> None:
    over_plain, _ = speeds(machine, text)
    assert over_plain >= 0.98


def bounded(machine: Machine, text: Text) -> list[float]:
    """Speeds over plain steps where what drafts lose is bounded, in a first text and a second one."""
    plain = statistics.mean(seconds_per_token(machine, text, FixedSizes(0), seed) for seed in SEEDS)
    taken: list[list[float]] = [[], []]
    for seed in SEEDS:
        sizes = SizesByCost("mtp", is_bounded=True)
        for turn, each in enumerate(taken):
            each.append(seconds_per_token(machine, text, sizes, seed + 1000 * turn))
    return [plain / statistics.mean(each) for each in taken]


@pytest.mark.parametrize("text", [Text(0.88), Text(0.6), Text(0.05)])
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_bounded_drafts_that_do_not_pay_lose_almost_nothing(text: Text, noise: float) -> None:
    first, second = bounded(Machine(DEMO, BY_DEMO, noise=noise), text)
    assert first >= 0.985
    assert second >= 0.99


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_bounded_drafts_are_used_where_they_pay(noise: float) -> None:
    for speed in bounded(Machine(LAYERS, BY_LAYERS, noise=noise), Text(0.87)):
        assert speed >= 1.15
