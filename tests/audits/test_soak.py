"""The soak: a minute of it over a real server, and that it notices what grows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.audits import soak

FLAT = soak.Sample(0.0, 0, 100 << 20, 20, 5, 300 << 20, 12, 9)


def rising(name: str, by: int, count: int = 40) -> list[soak.Sample]:
    return [replace(FLAT, **{name: getattr(FLAT, name) + by * i}) for i in range(count)]


@pytest.mark.parametrize("name", ["api_rss", "engine_rss"])
def test_a_leak_of_one_mebibyte_a_sample_is_noticed(name: str) -> None:
    assert [each.split()[0] for each in soak.complaints(soak.growth(rising(name, 1 << 20)))] == [name]


@pytest.mark.parametrize("name", ["api_descriptors", "engine_descriptors", "api_threads", "engine_threads"])
def test_a_descriptor_or_thread_in_every_fourth_sample_is_noticed(name: str) -> None:
    samples = [replace(FLAT, **{name: getattr(FLAT, name) + i // 4}) for i in range(40)]
    assert [each.split()[0] for each in soak.complaints(soak.growth(samples))] == [name]


@given(st.lists(st.integers(-8 << 20, 8 << 20), min_size=8, max_size=60))
def test_memory_that_goes_up_and_down_within_the_limit_is_no_growth(noise: list[int]) -> None:
    samples = [replace(FLAT, api_rss=FLAT.api_rss + each) for each in noise]
    assert soak.complaints(soak.growth(samples)) == []


def test_what_grows_in_the_first_quarter_alone_fills_caches() -> None:
    samples = [replace(FLAT, engine_rss=min(i, 10) << 24) for i in range(40)]
    assert soak.complaints(soak.growth(samples)) == []


@pytest.mark.sharded(of="measurements")
def test_a_minute_of_mixed_traffic_is_answered_and_leaves_nothing_behind(part_of_examples: slice) -> None:
    seconds = len(range(60)[part_of_examples])
    result = soak.soak(seconds=seconds, clients=6, threads=2, seed=1)
    assert result["faults"] == []
    assert result["grown_too_much"] == []
    kinds = {"chat", "stream", "given up", "tool", "schema", "shared prefix", "messages", "bad", "golden"}
    assert result["requests"].keys() == kinds
    assert result["statistics"]["cancelled_requests"] > 0
