"""When an engine that died is started again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import ConfigError
from coldstream.server.restarts import RestartPolicy, Restarts

POLICIES = st.builds(
    RestartPolicy,
    first_delay_s=st.floats(0, 1),
    max_delay_s=st.floats(1, 20),
    max_deaths=st.integers(1, 8),
    cool_down_s=st.floats(0, 100),
)


@given(POLICIES, st.lists(st.booleans(), max_size=200))
def test_the_breaker_opens_exactly_after_so_many_deaths_in_a_row(
    policy: RestartPolicy, is_death: list[bool]
) -> None:
    restarts, in_a_row = Restarts(policy), 0
    for died in is_death:
        if not died:
            restarts.moved()
            in_a_row = 0
            continue
        in_a_row += 1
        restart = restarts.died()
        assert restart.is_broken == (in_a_row >= policy.max_deaths)
        if restart.is_broken:
            assert restart.delay_s == policy.cool_down_s
        else:
            assert policy.first_delay_s <= restart.delay_s <= policy.max_delay_s
    assert restarts.total == sum(is_death)


def test_delays_double_up_to_the_longest() -> None:
    restarts = Restarts(RestartPolicy(0.5, 3.0, max_deaths=6, cool_down_s=60.0))
    assert [restarts.died().delay_s for _ in range(7)] == [0.5, 1.0, 2.0, 3.0, 3.0, 60.0, 60.0]
    restarts.moved()
    assert restarts.died().delay_s == 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_delay_s": -1.0},
        {"max_delay_s": 0.01},
        {"max_deaths": 0},
        {"cool_down_s": -1.0},
        {"hang_s": 0.0},
    ],
)
def test_impossible_policies_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"restarts need|hang_s must be more than 0"):
        RestartPolicy(**wrong)  # type: ignore[arg-type]
