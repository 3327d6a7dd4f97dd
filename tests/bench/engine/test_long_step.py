"""The model of a long step: bounds that no schedule of its work can beat, and what its figures say."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bench.engine.long_step import STEPS, Step, Times, cases, simulated

milliseconds = st.floats(0.001, 1.0)
times = st.builds(Times, *[milliseconds] * 10)
steps = st.builds(
    Step,
    layers=st.integers(1, 6),
    experts=st.integers(1, 300),
    cpu_rows=st.floats(1, 64),
    launches=st.integers(1, 40),
    group_launches=st.integers(1, 5),
    group=st.integers(1, 32),
    buffers=st.integers(2, 8),
    halves=st.sampled_from([1, 2]),
)


@given(step=steps, times=times)
def test_a_step_takes_as_long_as_each_works_and_every_expert_is_computed_once(
    step: Step, times: Times
) -> None:
    found = simulated(step, times)
    assert all(found["step_ms"] >= 0.999 * found[who] for who in ("host", "bus", "cpu", "gpu"))
    copied = found["bus"] / times.bus
    assert abs(copied + found["cpu_experts"] - step.layers * step.experts) < 0.01


def test_the_less_the_host_takes_the_sooner_a_step_ends() -> None:
    for step, figures in STEPS.values():
        ends = [simulated(step, replace(figures, launch=launch))["step_ms"] for launch in (0.0, 0.03, 0.06)]
        assert ends == sorted(ends)


def test_halves_of_a_step_do_not_pay_as_the_cpu_reads_an_expert_for_each() -> None:
    """What docs/notes/streaming.md says of them."""
    for step, figures in STEPS.values():
        found = cases(step, figures)
        assert found["halves"]["step_ms"] > found["graphs"]["step_ms"]
        assert found["halves"]["cpu"] > found["graphs"]["cpu"]
