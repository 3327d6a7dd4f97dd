"""The machine is measured once."""

import json
from pathlib import Path

from coldstream.engine.machine import measured_hardware
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
