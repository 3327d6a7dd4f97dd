"""The benchmark of the host's part of a step runs, and finds all its parts in the product."""

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from bench.engine import host_steps


def test_all_parts_of_a_step_take_the_host_time(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    host_steps.write_model(path, layers=4, vocab=1024)
    row = host_steps.measure(path, 0.5, num_warm=8, num_timed=24)
    assert 0.2 < row["hit_rate"] < 0.9
    assert row["copies_per_token"] > 1, "some experts come and go"
    assert all(microseconds > 0 for microseconds in row["us"].values())
