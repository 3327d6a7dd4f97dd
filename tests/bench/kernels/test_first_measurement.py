"""What the benchmark of a first measurement says of several of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.kernels import first_measurement
from coldstream.placement.conditions import Conditions
from side_in_thread import MACHINE


def test_the_first_measurement_has_its_time_and_no_part_in_the_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter((9e9, 2e10, 3e10, 2.4e10))

    def measure(machine: Any, progress: Any) -> Any:
        progress("measuring", 0, 6)
        rate = next(rates)
        types = ((rate, 1e11),)
        return replace(MACHINE, row_bytes_per_s=rate, read_bytes_per_s=2e10, product_values_per_s=types)

    monkeypatch.setattr(first_measurement, "measure_rates", measure)
    monkeypatch.setattr(first_measurement, "hardware_of", lambda gpu: MACHINE)
    written: dict[str, Any] = {}
    monkeypatch.setattr(first_measurement, "write_result", lambda result, *_: written.update(result))
    assert first_measurement.main(["--device", "cpu", "--times", "3"]) == 0
    assert len(written["runs"]) == 4
    assert all(len(run["stages_began_s"]) == 1 for run in written["runs"])
    assert written["spreads"]["row_bytes_per_s"] == 1.5
    assert written["spreads"]["read_bytes_per_s"] == 1.0
    assert written["spread"]["most_of"] == "row_bytes_per_s"
    assert (written["spread"]["types_median"], written["spread"]["types_most"]) == (1.25, 1.5)


def test_what_the_machine_did_meanwhile_is_no_rate() -> None:
    conditions = Conditions(2, other_cpus=1.0, load_average=2.0, spread=0.1)
    found = dict(first_measurement.rates_of({"a": 2.0, "conditions": vars(conditions), "of": [[3.0]]}))
    assert {"a", "of.0.0", "conditions.load_average"} <= found.keys()
    assert first_measurement.spreads([found, found]) == {"a": 1.0, "of.0.0": 1.0}
