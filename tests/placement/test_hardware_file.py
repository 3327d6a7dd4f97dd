"""Rates of a machine: kept for it alone, the CPU's apart from the GPU's, and none from a file of no use."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement.conditions import Conditions
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.hardware_file import (
    RatesEntry,
    RatesFile,
    age_days,
    default_path,
    describe_rates,
    fastest_run,
    store_rates,
    with_stored_rates,
)

GPU = GpuHardware(
    *("a GPU", "580.1", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6),
    tuple(number * 1e9 for number in range(1, 8)),
    measured_at="2026-01-02 03:04 UTC",
    conditions=Conditions(8, 0.5, 1.25, 0.02, 0.7),
    steps=StepRates(2e-6, 5e11, 2e10, 1.5e10, 1.6e10, 4e-6, 3e10, 2.5e10, 2e-5, 1e14),
)
UNSAID = StepRates(None, None, 2e10, 1.5e10, 1.6e10, 4e-6, 3e10, 2.5e10, 2e-5, 1e14)
BARE_GPU = GpuHardware("a GPU", "580.1", 2**35, 2**33)
PRODUCTS = tuple((1e10 + place, 2e10, 3e10) for place, _ in enumerate(QuantType))
BARE = Hardware("a CPU", ("avx2",), 8, 4, 2**36, 2**35)
MACHINE = replace(
    BARE,
    measured_at="2026-01-02 03:04 UTC",
    product_values_per_s=PRODUCTS,
    row_bytes_per_s=4e10,
    mixers=MixerRates(2e-6, 2e-5, 6e9, 6e10, 3e10, 1e10, 1e10),
    conditions=Conditions(8, 4.5, None, 0.3, 0.4, 2),
)


@pytest.mark.parametrize(
    "gpu", [None, GPU, replace(GPU, handshake_s=None), replace(GPU, steps=None), replace(GPU, steps=UNSAID)]
)
def test_rates_come_back_and_what_is_free_stays_of_today(tmp_path: Path, gpu: GpuHardware | None) -> None:
    path = tmp_path / "new" / "folder" / "hardware.json"
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=gpu), path)
    today = replace(BARE, ram_available_bytes=1, gpu=gpu and BARE_GPU)
    stored = with_stored_rates(today, path)
    assert stored == replace(
        today,
        read_bytes_per_s=5e10,
        product_values_per_s=PRODUCTS,
        row_bytes_per_s=4e10,
        mixers=MACHINE.mixers,
        gpu=gpu and replace(gpu, free_bytes=2**33),
        measured_at=MACHINE.measured_at,
        conditions=MACHINE.conditions,
    )
    assert [child.name for child in path.parent.iterdir()] == ["hardware.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"launch_s": 0.0},
        {"launch_s": 1.0},
        {"launch_s": "2e-6"},
        {"launch_s": None},
        {"row_bytes_per_s": None},
        {"row_bus_alone": None},
        {"row_bus_beside": float("nan")},
        {"staged_beside": -1.0},
        {"misses_alone": 1e300},
        {"misses_beside": 10},
        {"another": 1e9},
    ],
)
def test_absurd_rates_of_steps_are_refused_and_the_others_stay(tmp_path: Path, change: Any) -> None:
    path, today = tmp_path / "hardware.json", replace(BARE, gpu=BARE_GPU)
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU), path)
    document = json.loads(path.read_text())
    document["gpu"]["steps"] |= change
    path.write_text(json.dumps(document))
    stored = with_stored_rates(today, path)
    assert stored is not None
    assert stored.gpu == replace(GPU, free_bytes=2**33, steps=None)
    for none in (None, [], 5):
        document["gpu"]["steps"] = none
        path.write_text(json.dumps(document))
        assert with_stored_rates(today, path) == stored


@pytest.mark.parametrize("rates", [None, 5e9, [], [1e9] * 6, [1e9] * 8, [1e9] * 6 + [0.0], [1e9] * 6 + ["1"]])
def test_a_list_of_rates_that_is_not_whole_is_none(tmp_path: Path, rates: object) -> None:
    path = tmp_path / "hardware.json"
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU), path)
    document = json.loads(path.read_text())
    document["gpu"]["rates"]["expert_bytes_per_s"] = rates
    path.write_text(json.dumps(document))
    assert with_stored_rates(replace(MACHINE, gpu=BARE_GPU), path) is None


@pytest.mark.parametrize(
    "rates",
    [None, 5.0, [], PRODUCTS[1:], [*PRODUCTS[1:], PRODUCTS[0][1:]], [*PRODUCTS[1:], (1e9, 2e9, 0.0)]],
    ids=["none", "one", "empty", "a type missing", "rows missing", "a rate of nothing"],
)
def test_rates_of_other_types_than_todays_are_none(tmp_path: Path, rates: object) -> None:
    path = tmp_path / "hardware.json"
    store_rates(replace(MACHINE, read_bytes_per_s=5e10), path)
    document = json.loads(path.read_text())
    assert document["cpu"]["rates"]["product_values_per_s"] == [list(each) for each in PRODUCTS]
    document["cpu"]["rates"]["product_values_per_s"] = rates
    path.write_text(json.dumps(document))
    assert with_stored_rates(BARE, path) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(MACHINE, cpu_name="another", gpu=BARE_GPU),
        replace(MACHINE, num_physical_cores=3, gpu=BARE_GPU),
        replace(MACHINE, gpu=replace(BARE_GPU, name="another")),
        replace(MACHINE, gpu=replace(BARE_GPU, driver="580.2")),
    ],
)
def test_another_machines_rates_are_none(tmp_path: Path, other: Hardware) -> None:
    path = tmp_path / "hardware.json"
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU), path)
    assert with_stored_rates(other, path) is None


def test_what_a_run_on_the_cpu_measures_leaves_the_gpus_rates_alone(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    with_gpu = replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU)
    store_rates(with_gpu, path, 2.5)
    assert with_stored_rates(MACHINE, path) == replace(MACHINE, read_bytes_per_s=5e10)
    later = replace(MACHINE, read_bytes_per_s=6e10, measured_at="2026-03-01 00:00 UTC")
    store_rates(later, path, 4.0)
    assert with_stored_rates(replace(MACHINE, gpu=BARE_GPU), path) == replace(
        later, gpu=replace(GPU, free_bytes=2**33)
    ), "with the time of its own measurement"
    assert with_stored_rates(MACHINE, path) == later
    assert fastest_run(with_gpu, path) == 2.5
    assert fastest_run(MACHINE, path) == 4.0


def test_a_file_of_the_cpu_lacks_the_gpus_rates(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    store_rates(replace(MACHINE, read_bytes_per_s=5e10), path)
    assert with_stored_rates(MACHINE, path) is not None
    assert with_stored_rates(replace(MACHINE, gpu=BARE_GPU), path) is None


def test_a_file_of_another_version_is_none_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    with_gpu = replace(MACHINE, gpu=BARE_GPU)
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU), path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"version": document["version"] - 1}))
    assert with_stored_rates(with_gpu, path) is with_stored_rates(MACHINE, path) is None
    store_rates(replace(MACHINE, read_bytes_per_s=6e10), path)
    assert with_stored_rates(with_gpu, path) is None
    assert with_stored_rates(MACHINE, path) is not None


def test_a_damaged_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    today = replace(MACHINE, gpu=BARE_GPU)
    assert with_stored_rates(today, path) is None
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU), path)
    whole = path.read_bytes()
    assert with_stored_rates(today, path) is not None
    for length in range(0, len(whole) - 2, 5):
        path.write_bytes(whole[:length])
        assert with_stored_rates(today, path) is None
    for content in (b"\xff", b"[" * 60_000, b"[]", b"null", b'{"machine": 1}', b" " * 2**20 + whole):
        path.write_bytes(content)
        assert with_stored_rates(today, path) is None
    assert with_stored_rates(today, tmp_path) is None


@pytest.mark.parametrize(
    "value",
    [None, 0.0, -1.0, 1e-300, 1e5, 1e15, 1e300, "5e10", True, float("nan"), float("inf"), [], 10**400],
)
@pytest.mark.parametrize(("part", "name"), [("cpu", "read_bytes_per_s"), ("gpu", "link_beside_read")])
def test_a_rate_that_is_none_spoils_its_entry(tmp_path: Path, part: str, name: str, value: Any) -> None:
    path = tmp_path / "hardware.json"
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU), path)
    document = json.loads(path.read_text())
    document[part]["rates"][name] = value
    path.write_text(json.dumps(document))
    assert with_stored_rates(replace(MACHINE, gpu=BARE_GPU), path) is None
    assert (with_stored_rates(MACHINE, path) is None) == (part == "cpu")


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda document: None, "current"),
        (lambda document: document.pop("gpu"), "incomplete"),
        (lambda document: document.pop("version"), "of another version"),
        (lambda document: document.update(version=4), "of another version"),
        (lambda document: document["cpu"]["machine"].update(cores=3), "of another machine"),
        (lambda document: document["gpu"]["machine"].update(driver="580.2"), "of another machine"),
        (lambda document: document.update(cpu=[]), "damaged"),
        (lambda document: document["cpu"]["rates"].update(read_bytes_per_s=-1.0), "damaged"),
        (lambda document: document["gpu"].pop("measured_at"), "damaged"),
        (lambda document: document["gpu"].update(measured_at="tomorrow"), "damaged"),
        (lambda document: document["gpu"]["rates"].update(handshake_s=2.0), "damaged"),
        (lambda document: document["cpu"].update(conditions=[]), "damaged"),
        (lambda document: document["cpu"]["conditions"].pop("clock"), "damaged"),
        (lambda document: document["cpu"]["conditions"].update(other_cpus=float("nan")), "damaged"),
        (lambda document: document["cpu"]["conditions"].update(spread=-1.0), "damaged"),
        (lambda document: document["cpu"]["conditions"].update(num_tries=0), "damaged"),
        (lambda document: document["cpu"]["conditions"].update(other_cpus=1e7), "damaged"),
    ],
)
def test_it_is_said_why_rates_are_none(tmp_path: Path, change: Any, state: str) -> None:
    path = tmp_path / "hardware.json"
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU), path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    machine = replace(BARE, gpu=BARE_GPU)
    found = describe_rates(machine, path)
    assert found.state == state
    is_current = state == "current"
    assert (with_stored_rates(machine, path) is not None) == is_current
    problems = MACHINE.conditions.problems if MACHINE.conditions else ()
    assert len(problems) == 3
    entries = (
        RatesEntry("cpu", "2026-01-02 03:04 UTC", problems, is_due=True),
        RatesEntry("gpu", "2026-01-02 03:04 UTC", (), is_due=False),
    )
    assert found.entries == (entries if is_current else ())


@pytest.mark.parametrize(
    ("part", "name", "value", "absurd"),
    [
        ("cpu", "read_bytes_per_s", 1e30, "read_bytes_per_s is not from 1e+06 to 1e+14"),
        ("cpu", "read_bytes_per_s", "fast", "read_bytes_per_s is not from 1e+06 to 1e+14"),
        ("cpu", "product_values_per_s", [], "product_values_per_s is not from 100000 to 1e+17"),
        ("gpu", "handshake_s", 2.0, "handshake_s is not from 1e-09 to 1"),
        ("gpu", "more", 2.0, ""),
    ],
)
def test_what_no_machine_has_is_named_with_what_one_may_have(
    tmp_path: Path, part: str, name: str, value: Any, absurd: str
) -> None:
    path = tmp_path / "hardware.json"
    store_rates(replace(MACHINE, read_bytes_per_s=5e10, gpu=GPU), path)
    document = json.loads(path.read_text())
    document[part]["rates"][name] = value
    path.write_text(json.dumps(document))
    assert describe_rates(replace(BARE, gpu=BARE_GPU), path) == RatesFile("damaged", absurd=absurd)


def test_a_file_of_no_rates_at_all(tmp_path: Path) -> None:
    assert describe_rates(BARE, None).state == "absent"
    assert describe_rates(BARE, tmp_path / "none" / "hardware.json").state == "absent"
    assert describe_rates(BARE, tmp_path).state == "no file"
    assert describe_rates(BARE, Path("/dev/null/hardware.json")).state == "unreadable"
    path = tmp_path / "hardware.json"
    for content in (b"", b"{", b"[]", b"5", b"\xff", b"[" * 5000, b'"' + b"a" * 2**17):
        path.write_bytes(content)
        assert describe_rates(BARE, path).state == "damaged"
        assert with_stored_rates(BARE, path) is None


def test_an_age_is_of_whole_days_and_none_where_the_clock_was_set_back() -> None:
    now = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)
    assert age_days("2026-01-02 03:04 UTC", now) == 61
    assert age_days("2027-01-02 03:04 UTC", now) == 0


def test_tests_leave_the_rates_of_the_developer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_path() != Path.home() / ".cache" / "coldstream" / "hardware.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "coldstream" / "hardware.json"
