"""The machine is measured once."""

import json
import re
from pathlib import Path

import pytest

from coldstream.engine.machine import measured_hardware, reconsider_rates
from coldstream.placement import hardware
from coldstream.placement.hardware import Hardware


def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    first = measured_hardware(None, path=path)
    assert first.read_bytes_per_s is not None
    assert first.read_bytes_per_s > 1e8
    assert measured_hardware(None, path=path).read_bytes_per_s == first.read_bytes_per_s
    document = json.loads(path.read_text())
    document["rates"]["read_bytes_per_s"] = 123.0
    path.write_text(json.dumps(document))
    assert measured_hardware(None, path=path).read_bytes_per_s == 123.0
    path.write_text("{")
    again = measured_hardware(None, path=path)
    assert again.read_bytes_per_s not in (None, 123.0)
    assert again.cpu_name == Hardware.measure().cpu_name


def test_where_nothing_can_be_kept_it_is_measured_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert measured_hardware(None, path=tmp_path / "file" / "hardware.json").read_bytes_per_s is not None


def keep(path: Path, rate: float) -> None:
    """A file of this machine that says `rate`."""
    document = json.loads(path.read_text())
    document["rates"]["read_bytes_per_s"] = rate
    path.write_text(json.dumps(document))


def test_a_machine_is_measured_again_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    first = measured_hardware(None, path=path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", first.measured_at or "")
    keep(path, 123.0)
    kept = measured_hardware(None, path=path)
    assert (kept.read_bytes_per_s, kept.measured_at) == (123.0, first.measured_at)
    again = measured_hardware(None, path=path, again=True)
    assert again.read_bytes_per_s not in (None, 123.0)
    assert measured_hardware(None, path=path).read_bytes_per_s == again.read_bytes_per_s


def test_a_run_far_faster_than_the_kept_rate_has_the_machine_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hardware.json"
    assert not reconsider_rates(1e12, path)  # nothing is kept that could be wrong
    monkeypatch.setattr(hardware, "measure_read_bandwidth", lambda threads, num_bytes: 1e10)
    measured_hardware(None, path=path)
    keep(path, 1e9)
    assert not reconsider_rates(1.4e9, path)
    assert reconsider_rates(5e10, path)
    assert measured_hardware(None, path=path).read_bytes_per_s == 1e10
    assert not reconsider_rates(6e10, path)  # out of a cache: memory is no faster than it was found to be
    assert reconsider_rates(8e10, path)
    monkeypatch.setattr(hardware, "measure_read_bandwidth", lambda threads, num_bytes: 1e9)
    assert reconsider_rates(2e11, path)
    assert measured_hardware(None, path=path).read_bytes_per_s == 1e10  # the better of both
