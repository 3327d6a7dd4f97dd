"""Requests to the server of experts: what a line of the result says."""

from bench.kernels.expert_requests import measure


def test_each_size_unexpected_and_expected() -> None:
    rows = list(measure(2, [0, 3], [0, 1, 2], requests=9))
    kinds = [(experts, ahead) for experts in (0, 3) for ahead in (0, 1, 2)]
    assert [(row["experts"], row["expected_ahead"]) for row in rows] == kinds
    assert all(row["server_us"] > 0 for row in rows)
    assert all((row["bytes_per_s"] > 0) == (row["experts"] > 0) for row in rows)
