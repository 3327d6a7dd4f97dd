"""What disturbs a measurement is seen in the kernel's files, without this process's own work."""

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from coldstream.placement import conditions
from coldstream.placement.conditions import MOST_TRIES, Conditions, LoadWatch, is_idle, spread_of

TICKS = os.sysconf("SC_CLK_TCK")
QUIET = Conditions(8, 0.2, 0.5, 0.02, 0.8)


def write_stat(root: Path, busy_s: Sequence[float], steal_s: float = 0) -> None:
    """CPUs that were busy for so long, in user mode and in the kernel, and idle for an hour."""
    half = [int(each * TICKS / 2) for each in busy_s]
    lines = [
        f"cpu{number} {each} 0 {each} {3600 * TICKS} 77 0 0 {int(steal_s * TICKS)} 5 0"
        for number, each in enumerate(half)
    ]
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 0", ""]))


def watch_of(root: Path, cpu_ids: Sequence[int], own: Sequence[float] = (0, 0)) -> LoadWatch:
    """Of ten seconds, in which this process took what `own` says."""
    times, own_times = itertools.chain([0.0, 10.0]), iter(own)
    return LoadWatch(cpu_ids, root=root, clock=lambda: next(times), own_seconds=lambda: next(own_times))


@pytest.mark.parametrize("own", [0.0, 6.0, 12.0])
def test_other_programs_are_what_is_busy_without_this_process(tmp_path: Path, own: float) -> None:
    write_stat(tmp_path, [100, 200, 300])
    watch = watch_of(tmp_path, [0, 1], [7, 7 + own])
    write_stat(tmp_path, [104, 208, 999])  # the third CPU may not be used, and does not count
    assert watch.conditions().other_cpus == pytest.approx(max(0, 12 - own) / 10)


def test_time_that_a_host_takes_is_of_other_programs(tmp_path: Path) -> None:
    write_stat(tmp_path, [100])
    watch = watch_of(tmp_path, [0])
    write_stat(tmp_path, [100], steal_s=5)
    found = watch.conditions()
    assert found.other_cpus == pytest.approx(0.5)
    assert found.problems == ("other programs took 0.5 of 1 CPUs",)


@pytest.mark.parametrize(
    "text", [None, "", "cpu0", "cpu0 1 2 x 4 5 6 7 8\n", "cpu0 1 2 3\n", "cpu1 1 2 3 4 5 6 7 8\n", "\0\n\n"]
)
def test_what_the_system_does_not_show_disturbs_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/stat").write_text(text)
        (tmp_path / "proc/loadavg").write_text(text)
    found = watch_of(tmp_path, [0]).conditions()
    assert found == Conditions(1)
    assert found.problems == ()


def test_the_load_and_the_clock_are_read(tmp_path: Path) -> None:
    write_stat(tmp_path, [1, 1])
    (tmp_path / "proc/loadavg").write_text("2.25 1.00 0.50 1/100 4000\n")
    for number, now in enumerate((1_000_000, 2_000_000)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{now}\n")
        (folder / "cpuinfo_max_freq").write_text("4000000\n")
    found = watch_of(tmp_path, [0, 1]).conditions([10.0, 8.0, 9.0, 1.0])
    assert (found.load_average, found.clock) == (2.25, 0.375)
    assert found.spread == pytest.approx(0.2)
    assert found.problems == ("samples differed by 20%", "cores ran at 38% of their highest clock")


def test_a_spread_is_of_the_three_best() -> None:
    assert spread_of([5.0, 5.0]) is None
    assert spread_of([0.0, 0.0, 0.0]) is None
    assert spread_of([5.0, 1.0, 5.0, 4.0, 1.0]) == pytest.approx(0.2)


@pytest.mark.parametrize("change", [{"other_cpus": 0.9}, {"spread": 0.2}, {"clock": 0.3}])
def test_what_was_disturbed_is_due_until_it_was_tried_often(change: dict[str, float]) -> None:
    assert not QUIET.problems
    assert not QUIET.is_due
    disturbed = replace(QUIET, **change)
    assert len(disturbed.problems) == 1
    for tries in range(1, MOST_TRIES + 3):
        assert replace(disturbed, num_tries=tries).is_due == (tries < MOST_TRIES)


def test_conditions_come_back_and_absurd_ones_do_not() -> None:
    document = asdict(QUIET)
    assert Conditions.parsed(document) == QUIET
    bare = Conditions(4)
    assert Conditions.parsed(asdict(bare)) == bare
    for name in document:
        for value in (True, "1", [], -1, -0.5, 0, math.nan, math.inf, 1 << 30):
            assert Conditions.parsed(document | {name: value}) is None
        assert Conditions.parsed({key: each for key, each in document.items() if key != name}) is None
    for other in (None, [], 5, "text", document | {"more": 1.0}):
        assert Conditions.parsed(other) is None


@pytest.mark.parametrize("busy_share", [0.0, 0.05, 0.3])
def test_a_machine_is_idle_unless_others_take_a_tenth_of_it(
    monkeypatch: pytest.MonkeyPatch, busy_share: float
) -> None:
    monkeypatch.setattr(LoadWatch, "_other_cpus", lambda own: busy_share * 16)
    monkeypatch.setattr(conditions, "_WINDOW_S", 0)
    assert is_idle(range(16)) == (busy_share < 0.1)
