"""What drafts may lose: a share of the time, a stake and the last draft, whatever comes of them."""

from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.loss_bound import LossBound

PLAIN_S = 0.02
Draft = tuple[float, float]  # what it takes, and what its tokens are worth, both in plain steps

drafts = st.lists(st.tuples(st.floats(0.1, 20.0), st.floats(1.0, 20.0)), min_size=1, max_size=60)


def after_twelve_steps() -> LossBound:
    bound = LossBound()
    bound.earn(12, 12 * PLAIN_S, PLAIN_S)
    return bound


def take(bound: LossBound, draft: Draft) -> None:
    taken, worth = draft
    bound.earn(1, taken * PLAIN_S, PLAIN_S)
    bound.gained((worth - taken) * PLAIN_S, PLAIN_S)


@given(drafts)
def test_no_more_is_lost_than_a_share_a_stake_and_a_draft(tried: list[Draft]) -> None:
    bound, taken, worth = after_twelve_steps(), 12.0, 12.0
    for draft in tried:
        plain = bound.num_steps_until_any(PLAIN_S)
        if plain:
            bound.earn(plain, plain * PLAIN_S, PLAIN_S)
            taken, worth = taken + plain, worth + plain
            assert bound.num_steps_until_any(PLAIN_S) == 0, "it has waited for long enough"
        take(bound, draft)
        taken, worth = taken + draft[0], worth + draft[1]
        assert taken - worth <= 3.0 + 0.005 * taken + draft[0] + 1e-6


def test_drafts_that_lose_wait_the_longer_the_more_they_lost() -> None:
    waits = []
    for lost in (2.0, 4.0, 6.0):
        bound = after_twelve_steps()
        take(bound, (1.0 + lost, 1.0))
        waits.append(bound.num_steps_until_any(PLAIN_S))
    assert waits[0] == 0, "less than the stake"
    assert 0 < waits[1] < waits[2]
    assert 180 <= waits[1] <= 200, "half a percent of two hundred steps is the step beyond the stake"


def test_what_was_gained_may_be_lost_but_not_all_of_a_long_text() -> None:
    bound = after_twelve_steps()
    for _ in range(100):
        take(bound, (1.0, 2.0))
    lost = 0
    while bound.num_steps_until_any(PLAIN_S) == 0:
        take(bound, (2.0, 1.0))
        lost += 1
    assert 15 <= lost <= 18


def test_a_draft_that_stood_still_ends_drafts_for_some_hundred_steps_at_most() -> None:
    for seconds in (0.5, 5.0, 3600.0):
        bound = after_twelve_steps()
        take(bound, (seconds / PLAIN_S, 4.0))
        assert 0 <= bound.num_steps_until_any(PLAIN_S) <= 600
