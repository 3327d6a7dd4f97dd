"""Counts of several engines as those of one."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.experts.expert_map import ExpertMap
from coldstream.kvcache import CacheSize, PrefixStatistics
from coldstream.kvcache.prefix.tiers import TierStatistics
from coldstream.ray.totals import total_live, total_statistics

counts = st.integers(0, 1 << 40)
seconds = st.integers(0, 1 << 20).map(float)  # whole, so that the order of sums does not count
sizes = st.builds(CacheSize, counts, counts, counts)
tiers = st.builds(TierStatistics, st.just("ram"), *[counts] * 7, st.just(""))
prefixes = st.builds(PrefixStatistics, *[counts] * 13, st.tuples(tiers))
statistics = st.builds(
    EngineStatistics,
    *[counts] * 10,
    seconds,
    counts,
    counts,
    sizes,
    sizes,
    prefixes,
    st.none() | counts,
    st.none() | counts,
    counts,
    counts,
    counts,
)


@given(st.lists(statistics, min_size=1, max_size=4))
def test_every_count_is_a_sum(each: list[EngineStatistics]) -> None:
    total = total_statistics(each)
    for name in ("running", "generated_tokens", "step_s", "accepted_tokens"):
        assert getattr(total, name) == sum(getattr(one, name) for one in each)
    assert total.memory.num_blocks == sum(one.memory.num_blocks for one in each)
    assert total.prefixes.hits == sum(one.prefixes.hits for one in each)
    (tier,) = total.prefixes.tiers
    assert (tier.name, tier.saved) == ("ram", sum(one.prefixes.tiers[0].saved for one in each))
    known = [one.expert_hits for one in each if one.expert_hits is not None]
    assert total.expert_hits == (sum(known) if known else None)


@given(statistics)
def test_one_engine_is_its_own_total(one: EngineStatistics) -> None:
    assert total_statistics([one]) == one


@given(statistics, statistics)
def test_experts_are_those_of_the_first_engine_that_notes_them(
    one: EngineStatistics, two: EngineStatistics
) -> None:
    experts = ExpertMap((0,), 1, "AA==", None)
    states = [LiveState(one, None), LiveState(two, experts), LiveState(two, replace(experts, uses="AQ=="))]
    assert total_live(states).experts == experts
    assert total_live(states[:1]).experts is None
    assert total_live(states).statistics == total_statistics([one, two, two])
