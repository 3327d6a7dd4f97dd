"""Sizes of fused steps by what came of those before, on a made-up device whose costs are known."""

import random
from collections import deque

import pytest

from coldstream.decoding.backoff import AWAKE_STEPS, OBSERVED_STEPS, WAKE_DISTANCE, Backoff
from coldstream.decoding.fused_sizes import MOST_NODES, FixedFusedSizes, FusedSizesByCost, _chain
from coldstream.kernels.fused.reference import FusedResult

STEP_S, ROW_S, LINK_S = 2e-3, 3e-4, 2.5e-4


def time_of(num_nodes: int) -> float:
    return STEP_S + num_nodes * (ROW_S + LINK_S)


def accepted(num_drafted: int, num_right: int, *, is_last: bool = False) -> FusedResult:
    count = min(num_drafted, num_right)
    return FusedResult((0,) * (1 + count), 0, num_drafted, is_last)


def generate(
    sizes: FusedSizesByCost, chance: float, num_steps: int, seed: int = 1
) -> tuple[list[int], float, float]:
    """Sizes of fused steps with two in flight, whose tokens are right with `chance`; tokens and seconds."""
    rng, chosen, in_flight, tokens, seconds = random.Random(seed), [], deque([sizes.next()]), 0, 0.0
    for _ in range(num_steps):
        in_flight.append(sizes.next())
        num_nodes = in_flight.popleft()
        num_right = next((n for n in range(num_nodes) if rng.random() >= chance), num_nodes)
        chosen.append(num_nodes)
        tokens += 1 + num_right
        seconds += time_of(num_nodes)
        sizes.record(accepted(num_nodes, num_right), time_of(num_nodes))
    return chosen, tokens, seconds


@pytest.mark.parametrize(("chance", "least_gain"), [(0.95, 1.9), (0.8, 1.35)])
def test_drafts_that_pay_are_nearly_as_fast_as_the_best_size(chance: float, least_gain: float) -> None:
    sizes = FusedSizesByCost()
    generate(sizes, chance, 200)
    _, tokens, seconds = generate(sizes, chance, 2000)
    assert tokens / seconds * STEP_S > least_gain
    rates = [sum(chance**i for i in range(1 + n)) / time_of(n) for n in range(1 + MOST_NODES)]
    assert tokens / seconds > 0.92 * max(rates)


def test_drafts_that_do_not_pay_are_rare() -> None:
    sizes = FusedSizesByCost()
    generate(sizes, 0.05, 500)
    chosen, tokens, seconds = generate(sizes, 0.05, 3000)
    assert sum(n > 0 for n in chosen) < 0.1 * len(chosen)
    assert tokens / seconds * STEP_S > 0.97


def test_fused_steps_back_off_once_they_have_not_paid_for_long() -> None:
    """And a drafter observes the last tokens before they are tried again."""
    sizes = FusedSizesByCost()
    for _ in range(3):  # the first drafts are believed in
        generate(sizes, 0.0, 100)
    assert not sizes.backs_off()
    generate(sizes, 0.0, AWAKE_STEPS)
    assert sizes.backs_off()
    assert sizes.is_idle()
    num_backed_off = 0
    while sizes.is_idle():
        sizes.went_on(1, STEP_S)
        num_backed_off += 1
    assert sizes.backs_off()
    assert WAKE_DISTANCE - 2 * AWAKE_STEPS < num_backed_off < WAKE_DISTANCE - AWAKE_STEPS
    sizes.went_on(OBSERVED_STEPS, OBSERVED_STEPS * STEP_S)
    assert not sizes.backs_off()
    generate(sizes, 0.95, 400)
    assert not sizes.backs_off()


def test_fused_steps_that_pay_never_back_off() -> None:
    sizes = FusedSizesByCost()
    for _ in range(20):
        generate(sizes, 0.9, 100)
        assert not sizes.backs_off()
    assert not FixedFusedSizes(3).backs_off()


def test_only_sizes_that_have_graphs_are_chosen() -> None:
    sizes = FusedSizesByCost()
    chosen = [n for chance in (0.9, 0.3, 0.7) for n in generate(sizes, chance, 400)[0]]
    assert set(chosen) <= set(range(1 + MOST_NODES))
    assert max(chosen) <= sizes.most
    assert len(set(chosen)) > 2


def test_fused_steps_in_flight_at_the_end_of_a_text_are_forgotten() -> None:
    sizes = FusedSizesByCost()
    sizes.next()
    sizes.next()
    sizes.start()
    assert sizes.next() == 0
    sizes.record(accepted(0, 0, is_last=True), 1.0)
    with pytest.raises(IndexError):
        sizes.record(accepted(0, 0), 1.0)


def test_the_first_fused_step_of_a_text_tells_no_time() -> None:
    """It is begun with work that no other has, and would make drafts look slow or plain steps."""
    sizes = FusedSizesByCost()
    for _ in range(40):
        sizes.start()
        sizes.next()
        sizes.record(accepted(0, 0), 5.0)
    assert not sizes._policy._times.has_any


def test_fixed_fused_sizes_are_one_size() -> None:
    sizes = FixedFusedSizes(3)
    assert (sizes.next(), sizes.next(), sizes.most) == (3, 3, 3)


def test_the_last_fused_step_of_a_text_says_nothing_of_what_is_accepted() -> None:
    """Its draft was cut off by the end of the text, not by the model."""
    sizes, other = FusedSizesByCost(), FusedSizesByCost()
    for each, is_last in ((sizes, True), (other, False)):
        for _ in range(40):
            each.next()
            each.record(accepted(3, 0, is_last=is_last), STEP_S)
    fresh = FusedSizesByCost()._acceptance.expected("fused", _chain(3))
    assert sizes._acceptance.expected("fused", _chain(3)) == fresh
    assert other._acceptance.expected("fused", _chain(3))[0] < fresh[0] / 2


def test_drafts_rest_from_the_512th_step_on_in_which_they_have_not_gained() -> None:
    rest = Backoff()
    rest.went_by(AWAKE_STEPS - 1, has_gained=False)
    assert rest.num_steps == 0
    rest.went_by(1, has_gained=False)
    assert rest.num_steps == WAKE_DISTANCE - AWAKE_STEPS
    rest.went_by(WAKE_DISTANCE - AWAKE_STEPS - 1, has_gained=False)
    assert rest.num_steps == 1
    rest.went_by(1, has_gained=False)
    assert rest.num_steps == 0
    rest.went_by(AWAKE_STEPS, has_gained=False)
    assert rest.num_steps > 0
    rest.went_by(1, has_gained=True)
    assert rest.num_steps == 0
