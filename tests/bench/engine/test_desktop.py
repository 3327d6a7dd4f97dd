"""A desktop's table: what each side measures, and lines that go on where an earlier run ended."""

import json
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xllamacpp

from bench.engine import desktop, desktop_workers
from bench.full_size_model import FullSizeWriter
from bench.peers import gpu_peer
from coldstream.planning import gather
from side_in_thread import MACHINE, side
from small_shape import SMALL

(LLAMA,) = Path(xllamacpp.__file__).parent.glob("*.abi3.so")
WORDS = "--device cpu --settings 1:3 1:7 --experts 0,3 --cpu-layers 2,1 --prompts 20,33"
MORE = "--warm-tokens 4 --timed-tokens 4 --texts 1 --generate 4 --runs 2 --commit c0ffee"


class Bus:
    """Programs that never begin, and what was asked of them."""

    def __init__(self) -> None:
        self.number, self.asked = 0, list[int]()

    def activate(self, number: int) -> None:
        self.number = number
        self.asked.append(number)

    @contextmanager
    def started(self, number: int, cpus: Collection[int] = ()) -> "Iterator[Bus]":
        yield self

    def bytes_left(self) -> float:
        return 5e10 / (self.number + 1)


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    bus = Bus()
    monkeypatch.setattr(desktop, "Programs", bus)
    monkeypatch.setattr(desktop, "bytes_left", bus.bytes_left)
    monkeypatch.setattr(desktop, "side", side)
    monkeypatch.setattr(desktop_workers, "measured_hardware", lambda *_, **__: MACHINE)
    monkeypatch.setattr(gather, "measured_hardware", lambda *_, **__: MACHINE)
    monkeypatch.setattr(desktop_workers, "run_on", lambda cpus: None)
    monkeypatch.setattr(gpu_peer, "SWEEP_TOKENS", 2)
    return bus


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    path, out = folder / "small.gguf", folder / "desktop.json"
    if not path.exists():
        FullSizeWriter(path, SMALL, seed=3, threads=2).write()
    argv = ["desktop", str(path), *WORDS.split(), *MORE.split(), "--llama", str(LLAMA), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*argv, *words])
    assert desktop.main() == 0
    written: dict[str, Any] = json.loads(out.read_text())
    return written


@pytest.mark.sharded(of="measurements")
def test_each_side_has_a_line_of_every_setting_and_none_twice(
    tmp_path: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_setting = ("--experts", "0", "--cpu-layers", "2", "--settings", "1:3")
    first = run(tmp_path, monkeypatch, *one_setting, "--measure", desktop.THEIRS, "--commit", "0ther")
    assert [row["commit"] for row in first["rows"]] == ["0ther"]
    result = run(tmp_path, monkeypatch)
    keys = [
        tuple(row[name] for name in ("side", "cores", "programs", "experts_gib")) for row in result["rows"]
    ]
    assert len(keys) == len(set(keys)) == 2 * 2 * 2
    assert {row["programs"] for row in result["rows"]} == {3, 7}
    assert all(len(row["figures"]["20"]["samples"]) == 1 for row in result["rows"])
    assert result["rows"][:1] == first["rows"]
    assert {row["commit"] for row in result["rows"][1:]} == {"c0ffee"}
    for row in result["rows"]:
        assert list(row["figures"]) == ["decode", "20", "33"]
        assert all(each["tok_s"] > 0 for each in row["figures"].values())
        assert row["bus_bytes_per_s"] == [5e10 / (row["programs"] + 1)] * 2
    theirs = [row for row in result["rows"] if row["side"] == desktop.THEIRS]
    assert {row["experts_share"] for row in theirs if row["experts_gib"] == 3} == {1 - 1 / SMALL.layers}
    assert all(str(True) in each["tried_tok_s"] for row in theirs for each in (row["figures"]["20"],))
    assert all(row["threads"] <= row["cores"] for row in theirs)


def test_a_run_that_is_over_begins_no_line(tmp_path: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "desktop.json"
    out.write_text(json.dumps({"rows": []}))
    assert run(tmp_path, monkeypatch, "--seconds", "-1")["rows"] == []
    assert bus.asked == [0, 3, 7]  # what they leave is measured


def test_a_process_that_ends_leaves_the_others_their_lines(tmp_path: Path) -> None:
    lines = desktop.Lines({}, tmp_path / "desktop.json", "c0ffee", 0.0)
    with (
        lines.of_others("a side"),
        desktop.side(ends, None, os.sched_getaffinity(0), {}) as connection,
    ):
        desktop.received(connection)
    assert lines.failed == ["a side"]


def test_a_process_of_a_side_has_its_cpus_and_its_environment() -> None:
    (cpu, *_) = before = sorted(os.sched_getaffinity(0))
    with desktop.side(about_process, "COLDSTREAM_TEST", {cpu}, {"COLDSTREAM_TEST": "x"}) as connection:
        assert desktop.received(connection) == ({cpu}, "x")
    assert sorted(os.sched_getaffinity(0)) == before
    assert "COLDSTREAM_TEST" not in os.environ


def ends(connection: Any, asked: object) -> None:
    pass


def about_process(connection: Any, name: str) -> None:
    connection.send((os.sched_getaffinity(0), os.environ.get(name)))
