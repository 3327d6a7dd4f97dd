"""Which missing layers the CPU computes, and which come over the bus."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.cpu_share import layers_of_cpu
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes

times = st.builds(
    lambda bus, cpu, more, answer: MissTimes(
        bus, tuple(cpu + more * row for row in range(MAX_MAILBOX_ROWS)), answer
    ),
    st.integers(1, 10**7),
    st.integers(1, 10**7),
    st.integers(0, 10**6),
    st.integers(0, 10**4),
)


@given(num_missing=st.integers(0, 64), rows=st.integers(1, MAX_MAILBOX_ROWS), times=times)
def test_no_other_number_of_layers_ends_sooner(num_missing: int, rows: int, times: MissTimes) -> None:
    count = len(layers_of_cpu(num_missing, rows, times))
    ends = [times.nanoseconds(num_missing - n, [rows] * n) for n in range(num_missing + 1)]
    assert ends[count] == min(ends)


@given(num_missing=st.integers(1, 64), rows=st.integers(1, MAX_MAILBOX_ROWS), times=times)
def test_the_sides_take_turns_evenly(num_missing: int, rows: int, times: MissTimes) -> None:
    of_cpu = layers_of_cpu(num_missing, rows, times)
    assert of_cpu <= set(range(num_missing))
    is_cpu = np.array([number in of_cpu for number in range(num_missing)])
    reached = np.cumsum(is_cpu)
    wanted = len(of_cpu) * np.arange(1, num_missing + 1) / num_missing
    assert np.abs(reached - wanted).max() <= 1


def test_more_rows_than_a_mailbox_takes_all_come_over_the_bus() -> None:
    fast = MissTimes(10**9, (1,) * MAX_MAILBOX_ROWS)
    assert layers_of_cpu(5, MAX_MAILBOX_ROWS, fast) == frozenset(range(5))
    assert layers_of_cpu(5, MAX_MAILBOX_ROWS + 1, fast) == frozenset()
