"""The file of last runs: bounded, by machine and model file, and left out where it is damaged."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from coldstream.errors import StorageError
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.run_file import MOST_KEPT, MOST_RUNS, LastRun, described, keep_run, last_runs

MACHINE = Hardware("a CPU", (), 16, 16, 2**37, 2**36, gpu=GpuHardware("a GPU", "580", 2**37, 2**37))
RUN = LastRun("2026-11-29 20:15 UTC", 3 * 2**30, 412, 4.6e-3, 4.1e-3, 0.75, 0.78, 1.31, None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "runs.json"


def test_the_last_runs_are_kept_by_machine_and_file(path: Path) -> None:
    assert last_runs(MACHINE, "a", path) == ("absent", ())
    for steps in range(100, 105):
        keep_run(MACHINE, "a", replace(RUN, steps=steps), path)
    keep_run(MACHINE, "b", RUN, path)
    state, runs = last_runs(MACHINE, "a", path)
    assert (state, [run.steps for run in runs]) == ("current", [104, 103, 102])
    assert len(runs) == MOST_RUNS
    assert last_runs(MACHINE, "b", path)[1] == (RUN,)
    assert last_runs(replace(MACHINE, num_physical_cores=8), "a", path)[1] == ()
    assert last_runs(replace(MACHINE, gpu=None), "a", path)[1] == ()


def test_only_the_last_files_are_kept(path: Path) -> None:
    for number in range(MOST_KEPT + 3):
        keep_run(MACHINE, f"{number:032x}", RUN, path)
    found = [bool(last_runs(MACHINE, f"{number:032x}", path)[1]) for number in range(MOST_KEPT + 3)]
    assert found == [False] * 3 + [True] * MOST_KEPT


def test_as_many_runs_as_are_kept_fit_into_what_is_read(path: Path) -> None:
    named = replace(MACHINE, cpu_name="x" * 64, gpu=replace(MACHINE.gpu, name="y" * 64))  # type: ignore[arg-type]
    longest = replace(RUN, step_s=1 / 3e5, expected_s=1 / 3e5, hit_rate=1 / 3, expected_hit_rate=1 / 3)
    for number in range(MOST_RUNS * MOST_KEPT):
        keep_run(named, f"{number % MOST_KEPT:032x}", replace(longest, bus_factor=1 / 3), path)
    assert last_runs(named, f"{0:032x}", path)[0] == "current"


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in asdict(RUN).items() if key != name}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({"version": 1}),
        json.dumps({"version": 1, "runs": [7]}),
        json.dumps({"version": 1, "runs": [{"of": {}, "runs": 7}]}),
        json.dumps({"version": 1, "runs": [{"of": {}, "runs": [asdict(RUN)] * (MOST_RUNS + 1)}]}),
        *(
            json.dumps({"version": 1, "runs": [{"of": {}, "runs": [run]}]})
            for run in (
                None,
                without("steps"),
                asdict(RUN) | {"more": 1},
                asdict(RUN) | {"steps": 0},
                asdict(RUN) | {"steps": 1.5},
                asdict(RUN) | {"vram_bytes": 10**400},
                asdict(RUN) | {"step_s": 1e7},
                asdict(RUN) | {"ended_at": "yesterday"},
                asdict(RUN) | {"step_s": float("nan")},
                asdict(RUN) | {"step_s": float("inf")},
                asdict(RUN) | {"hit_rate": -1.0},
                asdict(RUN) | {"cpu_factor": "fast"},
            )
        ),
    ],
)
def test_a_damaged_file_is_left_out_and_written_anew(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    assert last_runs(MACHINE, "a", path) == ("damaged", ())
    keep_run(MACHINE, "a", RUN, path)
    assert last_runs(MACHINE, "a", path) == ("current", (RUN,))


def test_a_file_of_another_version_is_left_out(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"version": 2, "runs": "of another kind"}))
    assert last_runs(MACHINE, "a", path) == ("of another version", ())


def test_a_place_that_is_none_is_an_error_for_who_writes(path: Path) -> None:
    path.mkdir(parents=True)
    assert last_runs(MACHINE, "a", path) == ("unreadable", ())
    with pytest.raises(StorageError):
        keep_run(MACHINE, "a", RUN, path)
    with pytest.raises(StorageError):
        keep_run(MACHINE, "a", RUN, Path("/dev/null/runs.json"))
    keep_run(MACHINE, "a", RUN, None)
    assert last_runs(MACHINE, "a", None) == ("absent", ())


def test_a_run_is_described_in_a_line() -> None:
    assert described(RUN) == (
        "the run that ended 2026-11-29 20:15 UTC, with 3.00 GiB: 412 tokens by themselves, 4.60 ms each in "
        "their layers, 4.10 ms were expected of a whole token; 75% of uses were hits, 78% expected; an "
        "expert took the CPU 1.31 times as long as planned"
    )
    both = described(replace(RUN, bus_factor=0.92))
    assert both.endswith("the CPU 1.31 times as long as planned and the bus 0.92 times as long as planned")
    assert "took the CPU" not in described(replace(RUN, cpu_factor=None))
