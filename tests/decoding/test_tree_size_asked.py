"""How many nodes are asked for: what the next one brings against what it takes to draft it."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.tree_size import AskedNodes

Seconds = Callable[[int], float]  # of a draft, by the nodes asked for


def settle(
    asked: AskedNodes, seconds: Seconds, brings: Sequence[float], most: int = 20, drafts: int = 100
) -> list[int]:
    """What is asked for in the last 32 drafts if each node brings so much, and the ones after these nothing.

    Of one node more than was asked for it is forecast.
    """
    sums = list(accumulate(brings, initial=0.0))
    sizes = []
    for _ in range(drafts):
        sizes.append(asked.best(most, 100.0))
        worths = [sums[min(n, len(brings))] for n in range(2 + sizes[-1])]
        asked.record(seconds(sizes[-1]), worths, sizes[-1])
    return sizes[-32:]


HALVES = [0.5**n for n in range(1, 21)]


def test_nodes_that_cost_nothing_are_asked_for() -> None:
    assert set(settle(AskedNodes(), lambda n: 0.001, [0.5] * 20)) == {20}


def test_one_more_is_asked_for_than_is_worth_its_time() -> None:
    """At 100 tokens a second the third node, which brings an eighth, costs a tenth, the fourth too much.

    So of sixteen drafts one has the fourth.
    """
    assert Counter(settle(AskedNodes(), lambda n: 0.001 * n, HALVES, drafts=200)) == {3: 30, 4: 2}


def test_at_least_one_node_is_asked_for() -> None:
    assert Counter(settle(AskedNodes(), lambda n: 1.0 * n, HALVES, drafts=200)) == {1: 30, 2: 2}
    assert AskedNodes().best(1, 100.0) == 1


def test_of_drafts_that_end_early_no_more_is_asked_for() -> None:
    assert set(settle(AskedNodes(), lambda n: 0.001 + 1e-4 * n, [0.5] * 3)) == {3, 4}


def test_more_is_asked_for_again_when_nodes_bring_more() -> None:
    asked = AskedNodes()
    assert max(settle(asked, lambda n: 0.001 * n, HALVES)) == 4
    assert min(settle(asked, lambda n: 0.001 * n, [0.8**n for n in range(1, 21)], drafts=300)) >= 7


def test_a_node_that_brings_more_than_forecast_is_asked_for_every_other_time_at_least() -> None:
    asked, sizes = AskedNodes(), []
    for draft in range(120):
        sizes.append(asked.best(5, 100.0))
        more = 0.5 if draft >= 80 and sizes[-1] == 5 else 0.0
        asked.record(0.001 * sizes[-1], [0.0, 0.5, 1.0, 1.5, 2.0, 2.0 + more], sizes[-1])
    assert sizes[48:80].count(5) == 2
    assert sizes[-20:].count(5) >= 10


def test_one_more_is_asked_for_at_once_where_it_is_forecast_to_pay() -> None:
    for more, wanted in ((0.05, 4), (0.2, 5)):
        asked = AskedNodes()
        for _ in range(80):
            num_asked = asked.best(5, 100.0)
            asked.record(0.001 * num_asked, [0.0, 0.5, 1.0, 1.5, 2.0, 2.0], num_asked)
        if asked.best(5, 100.0) != 4:
            asked.record(0.005, [0.0, 0.5, 1.0, 1.5, 2.0, 2.0], 5)
        asked.record(0.004, [0.0, 0.5, 1.0, 1.5, 2.0, 2.0 + more], 4)
        assert asked.best(5, 100.0) == wanted


def test_the_time_of_a_draft_is_that_of_as_many_nodes_as_the_last() -> None:
    asked = AskedNodes()
    for num_asked in (1,) * 6 + (8,) * 3:
        asked.record(0.001 * num_asked, [0.0] * (2 + num_asked), num_asked)
    assert asked.draft_s == 0.008
    asked.record(0.001, [0.0, 0.0], 1)
    assert asked.draft_s == 0.001


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=70),
    st.integers(1, 63),
    st.floats(1.0, 1000.0),
    st.floats(0.0, 1.0),
)
def test_never_more_than_may_be_asked_for(
    brings: list[float], most: int, tokens_s: float, draft_s: float
) -> None:
    asked = AskedNodes()
    for _ in range(3):
        asked.record(draft_s, list(accumulate(brings, initial=0.0)), len(brings))
        assert 1 <= asked.best(most, tokens_s) <= most


def test_drafts_grow_node_by_node_from_what_is_known() -> None:
    """However much more it seems to bring: a draft of all nodes at once may take thirty times as long."""
    asked = AskedNodes()
    sizes = []
    for _ in range(6):
        sizes.append(asked.best(63, 100.0))
        asked.record(0.0, [0.9 * n for n in range(2 + sizes[-1])], sizes[-1])
    assert sizes == [4, 4, 5, 6, 7, 8]


def test_a_node_seen_first_in_a_hard_stretch_is_not_taken_for_a_bad_one() -> None:
    """What it brings is known from the node before it in the same draft."""
    asked = AskedNodes()
    easy, hard = [0.9 * n for n in range(13)], [0.0] * 13
    for _ in range(4):
        asked.record(0.001, easy[:6], 4)
    asked.record(0.001, hard, 11)
    for _ in range(10):
        num_asked = asked.best(11, 100.0)
        asked.record(0.001, easy[: 2 + num_asked], num_asked)
    assert num_asked == 11
