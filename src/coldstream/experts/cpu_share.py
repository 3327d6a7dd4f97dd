"""Which missing FFNs of a dense model the CPU computes in a step, and which are copied. Pure."""

from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes


def layers_of_cpu(num_missing: int, rows: int, times: MissTimes) -> frozenset[int]:
    """The numbers of those that the CPU computes in a step of `rows` rows, among 0 … num_missing − 1.

    As many as let the CPU and the bus end together, evenly between the others, so that one side works while
    the other's layer is awaited. None of more than MAX_MAILBOX_ROWS rows, which a mailbox does not take.
    """
    if rows > MAX_MAILBOX_ROWS or num_missing == 0:
        return frozenset()
    count = num_missing - times.num_streamed([rows] * num_missing)
    return frozenset(
        number
        for number in range(num_missing)
        if (number + 1) * count // num_missing > number * count // num_missing
    )
