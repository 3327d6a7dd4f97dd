"""Requests to the server of experts: what a line of the result says."""

from bench.kernels.expert_requests import measure


def test_expected_and_unexpected_requests_of_each_size() -> None:
    rows = list(measure(2, [0, 3], requests=9))
    assert [(row["experts"], row["is_expected"]) for row in rows] == [
        (0, False),
        (0, True),
        (3, False),
        (3, True),
    ]
    assert all(row["server_us"] > 0 for row in rows)
    assert all((row["bytes_per_s"] > 0) == (row["experts"] > 0) for row in rows)
