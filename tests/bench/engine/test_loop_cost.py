"""What the loop costs without its model."""

from pathlib import Path

import pytest

from bench.engine import loop_cost
from coldstream.models.cpu.runner import CpuRunner
from own_checkout import checkout_of_this


def test_no_layer_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*arguments: object) -> None:
        raise AssertionError("a layer is computed")

    monkeypatch.setattr(CpuRunner, "_run_trunk", computed)
    assert loop_cost.measure(40, 0.8) > 0


@pytest.mark.sharded(of="measurements")
def test_a_checkout_is_compared_with_this_one(tmp_path: Path) -> None:
    found = loop_cost.compare(checkout_of_this(tmp_path), 1, 0.8)
    assert found["ratio"] == found["new_us_per_token"] / found["old_us_per_token"] > 0
    assert found["interval"] == (found["ratio"],) * 2
