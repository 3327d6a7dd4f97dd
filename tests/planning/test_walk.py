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
from types import CodeType, FrameType

import pytest

import coldstream
from builders import Dims, write_gguf
from coldstream.assets import demo_model_path
from coldstream.cli.main import main
from coldstream.engine import LLM
from coldstream.experts.cpu.disk_tier import DiskTier
from coldstream.experts.partial_experts import PartialExperts
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.config import EngineConfig
from coldstream.planning.planned import Planned
from host_device import HostDevice
from host_gpu import opened_on

ROOT = f"{Path(coldstream.__file__).parent}/"
FOLLOWED = (EngineConfig, RunPlan, Planned)
MOST_STOPS = 15
DIMS = Dims(hidden=128, experts=16, experts_used=3, expert_ffn=128, shared_ffn=64)


@contextmanager
def walking(slots: CodeType = DiskTier.allocate.__code__) -> Iterator[list[str]]:
    """The files of the functions that are handed the settings or the plan meanwhile, up to the slots.

    slots: the function that makes them.
    """
    files: list[str] = []
    met: set[CodeType] = set()

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


def rooms_of(stops: list[str]) -> list[str]:
    return [room for room, _ in groupby(stop.split("/")[0] for stop in stops)]


@pytest.mark.sharded(of="plans")
def test_the_way_from_a_budget_to_the_slots_is_short_and_enters_each_room_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with open(os.devnull) as nothing, walking() as files:
        monkeypatch.setattr(sys, "stdin", nothing)
        code = main(["run", str(demo_model_path()), "--device", "cpu", "--ram", "30M", "-p", "x", "-n", "1"])
    assert code == 0
    stops = [file for file, _ in groupby(files)]
    assert stops[-1] == "experts/cpu/disk_tier.py"
    assert len(stops) <= MOST_STOPS, stops
    assert rooms_of(stops) == ["cli", "engine", "planning", "models", "experts"]


@pytest.mark.sharded(of="plans")
def test_the_way_is_as_short_on_a_gpu(tmp_path: Path, compiled_for_the_host: HostDevice) -> None:
    (path,) = write_gguf(tmp_path / "small.gguf", dims=DIMS)
    with opened_on(compiled_for_the_host), walking(PartialExperts.fill.__code__) as files:
        LLM(path, device="cuda", ctx_size=128, vram="454M", threads=1).close()
    stops = [file for file, _ in groupby(files)]
    assert stops[-1] == "experts/partial_experts.py"
    assert len(stops) <= MOST_STOPS, stops
    assert rooms_of(stops) == ["engine", "planning", "models", "experts"]


@pytest.mark.sharded(of="plans")
def test_a_plan_for_a_gpu_is_chosen_within_one_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts that the GPU lacks, so that rates, threads, the bus and more memory are asked for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (path,) = write_gguf(tmp_path / "tiny.gguf", dims=Dims(experts=64))
    with walking() as files:
        code = main(["plan", str(path), "--vram", "470M"])
    assert code == 0
    stops = [file for file, _ in groupby(files)]
    assert len(stops) <= MOST_STOPS, stops
    assert rooms_of(stops) == ["planning", "cli"]
