"""A reader who follows the settings from the command line to the slots does not get lost.

The walk is measured: its stops are the files whose functions are handed the settings, or the plan that they
become, in the order of the calls. A record's own methods are no stops, nor is a function that was met before.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType

import pytest

import coldstream
from coldstream.assets import demo_model_path
from coldstream.cli.main import main
from coldstream.experts.disk_tier import DiskTier
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.config import EngineConfig
from coldstream.planning.planned import Planned

ROOT = f"{Path(coldstream.__file__).parent}/"
FOLLOWED = (EngineConfig, RunPlan, Planned)
MOST_STOPS = 15


@contextmanager
def walking() -> Iterator[list[str]]:
    """The files of the functions that are handed the settings or the plan meanwhile, up to the slots."""
    files: list[str] = []
    met: set[object] = set()
    slots = DiskTier.allocate.__code__

    def follow(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code in met or slots in met:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        handed = [frame.f_locals.get(name) for name in names if name != "self"]
        if code is slots or any(isinstance(value, FOLLOWED) for value in handed):
            met.add(code)
            files.append(code.co_filename.removeprefix(ROOT))

    sys.setprofile(follow)
    try:
        yield files
    finally:
        sys.setprofile(None)


def test_the_way_from_a_budget_to_the_slots_is_short_and_enters_each_room_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with open(os.devnull) as nothing, walking() as files:
        monkeypatch.setattr(sys, "stdin", nothing)
        code = main(["run", str(demo_model_path()), "--device", "cpu", "--ram", "30M", "-p", "x", "-n", "1"])
    assert code == 0
    stops = [file for file, _ in groupby(files)]
    assert stops[-1] == "experts/disk_tier.py"
    assert len(stops) <= MOST_STOPS, stops
    rooms = [room for room, _ in groupby(stop.split("/")[0] for stop in stops)]
    assert rooms == ["cli", "engine", "planning", "models", "experts"]


def test_a_plan_for_a_gpu_is_chosen_within_one_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts that the GPU lacks, so that rates, threads, the bus and more memory are asked for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with walking() as files:
        code = main(["plan", str(demo_model_path()), "--vram", "480M"])
    assert code == 0
    stops = [file for file, _ in groupby(files)]
    assert len(stops) <= MOST_STOPS, stops
    rooms = [room for room, _ in groupby(stop.split("/")[0] for stop in stops)]
    assert rooms == ["planning", "cli"]
