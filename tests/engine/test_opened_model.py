"""An opened model: its warnings, its budget and its plan, and what its file recommends for sampling."""

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import SMALL_EXPERTS, make_model, write_model
from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig, SamplingParams, open_model, opened_model
from coldstream.engine.opened_model import sampling_defaults
from coldstream.errors import OutOfMemoryError, UnsupportedError
from coldstream.gguf import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.read_spec import read_spec
from coldstream.models.runner import ModelRunner
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan_file import save_plan
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.planned import Planned
from hash_runner import open_hash_model

CONFIG_OF_DEMO = EngineConfig(str(demo_model_path()), device="cpu", threads=1, ctx_size=256)


def test_warnings_are_those_of_the_device_and_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = replace(open_hash_model(tmp_path / "tiny.gguf"), open_warnings=("slow",))
    monkeypatch.setattr(opened.runner, "warnings", ("odd",))
    assert opened.warnings == ("slow", "odd")
    opened.close()


def test_a_budget_of_ram_leaves_experts_on_the_disk() -> None:
    config = EngineConfig(str(demo_model_path()), device="cpu", ram="30M", ctx_size=64)
    opened = open_model(config)
    assert opened.runner.disk is not None
    assert opened.runner.disk.num_slots < opened.runner.disk.num_experts
    opened.close()
    opened = open_model(replace(config, ram="1G"))
    assert opened.runner.disk is None
    opened.close()
    for ctx_size in (64, None):
        with pytest.raises(OutOfMemoryError, match=r"2\.00 MiB of RAM are below .*; try --ram \d+M"):
            open_model(replace(config, ram="2M", ctx_size=ctx_size))


def test_a_plan_for_the_cpu_is_a_budget_of_ram(tmp_path: Path) -> None:
    config = EngineConfig(str(demo_model_path()), device="cpu", ram="30M", ctx_size=64)
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        save_plan(plan_model(config, Sources(file, spec, Hardware.measure())).run, tmp_path / "plan.json")
    opened = open_model(EngineConfig(config.model, device="cpu", plan=str(tmp_path / "plan.json")))
    assert (opened.config.ram, opened.config.ctx_size) == (30 << 20, 64)
    assert opened.runner.disk is not None
    opened.close()


def test_without_a_budget_of_ram_a_model_may_take_most_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for free, has_disk in ((2**32, False), (34 << 20, True)):
        hardware = replace(Hardware.measure(), ram_available_bytes=free)
        monkeypatch.setattr(Hardware, "measure", lambda hardware=hardware: hardware)
        opened = open_model(EngineConfig(str(demo_model_path()), device="cpu", ctx_size=64))
        assert opened.plan.placement.budget_bytes == int(0.9 * free)
        assert (opened.runner.disk is not None) == has_disk
        opened.close()


def test_without_recommendations_the_defaults_hold() -> None:
    assert sampling_defaults({"general.name": "x"}) == SamplingParams()


def test_recommendations_of_the_file_are_taken() -> None:
    metadata = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
        "general.sampling.min_p": 0.0,
        "general.sampling.penalty_repeat": 1.1,
        "general.sampling.penalty_last_n": -1,
    }
    expected = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.1, repeat_last_n=None
    )
    assert sampling_defaults(metadata) == expected


@pytest.mark.parametrize(
    ("key", "value"), [("temp", -1.0), ("top_k", "many"), ("top_p", [0.5]), ("min_p", True)]
)
def test_recommendations_that_cannot_be_followed(tmp_path: Path, key: str, value: object) -> None:
    """Each is left out with a warning that names its key; the others hold."""
    model = make_model(dims=SMALL_EXPERTS)
    model.metadata |= {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    model.metadata[f"general.sampling.{key}"] = value
    (path,) = write_model(tmp_path / "odd.gguf", model)
    defaults = {"temperature": 0.5, "top_k": 7}
    defaults.pop({"temp": "temperature"}.get(key, key), None)
    opened = open_model(EngineConfig(str(path), device="cpu", threads=1, ctx_size=64))
    try:
        assert opened.default_sampling == SamplingParams(**defaults)
        (warning,) = (text for text in opened.warnings if "general.sampling" in text)
        assert warning.startswith(f"general.sampling.{key}: ")
    finally:
        opened.close()


def test_what_a_file_declares_and_lacks_is_a_warning(tmp_path: Path) -> None:
    """Of an MTP block that is not there, and of a text that nothing reads."""
    model = make_model("qwen35moe", dims=SMALL_EXPERTS)
    model.metadata |= {"qwen35moe.nextn_predict_layers": 1, "qwen35moe.block_count": 3}
    model.metadata["general.description"] = "in Latin-1: ?"
    (path,) = write_model(tmp_path / "odd.gguf", model)
    path.write_bytes(path.read_bytes().replace(b"Latin-1: ?", b"Latin-1: \xe9"))
    opened = open_model(EngineConfig(str(path), device="cpu", threads=1, ctx_size=64))
    try:
        for said in ("qwen35moe.nextn_predict_layers is 1", "general.description at byte"):
            assert sum(said in text for text in opened.warnings) == 1
        assert opened.runner.logits([1, 2]).shape == (2, 320)
    finally:
        opened.close()


def test_an_attention_window_is_that_of_the_forward_pass(tmp_path: Path) -> None:
    """One as long as what there is changes no bit, a shorter one changes logits; the same by a plan."""
    demo = EngineConfig(str(demo_model_path()), device="cpu", threads=1)
    windows = [replace(demo, ctx_size=64, attention_window=window) for window in (None, 20, 4)]
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        save_plan(plan_model(windows[2], Sources(file, spec, Hardware.measure())).run, tmp_path / "my.plan")
    logits = []
    for config in (*windows, replace(demo, plan=str(tmp_path / "my.plan"))):
        opened = open_model(config)
        sequence = opened.runner.new_sequence()
        logits.append(opened.runner.extend(sequence, list(range(300, 320))).tolist())
        opened.close()
    assert logits[0] == logits[1] != logits[2] == logits[3]


def read_as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of a model on the CPU is read by a thread too."""
    begin = opened_model._begin_reading
    monkeypatch.setattr(opened_model, "_begin_reading", lambda _, *others: begin("cuda", *others))


def test_the_vocabulary_is_read_beside_planning_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = threading.Event()
    read, plan = Tokenizer.from_metadata, opened_model.plan_model

    def read_later(metadata: Mapping[str, Any]) -> Tokenizer:
        assert has_begun.wait(60), "planning waits for the vocabulary"
        return read(metadata)

    def plan_now(*args: Any, **options: Any) -> Planned:
        has_begun.set()
        return plan(*args, **options)

    read_as_for_a_gpu(monkeypatch)
    monkeypatch.setattr(Tokenizer, "from_metadata", read_later)
    monkeypatch.setattr(opened_model, "plan_model", plan_now)
    with open_model(CONFIG_OF_DEMO).runner as runner:
        assert runner.tier


def test_a_cpu_starts_no_thread_for_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds no memory to begin with would be waited for forever."""
    readers, read = [], Tokenizer.from_metadata

    def noted(metadata: Mapping[str, Any]) -> Tokenizer:
        readers.append(threading.current_thread())
        return read(metadata)

    monkeypatch.setattr(Tokenizer, "from_metadata", noted)
    with open_model(CONFIG_OF_DEMO).runner:
        assert readers == [threading.current_thread()]


def test_what_is_wrong_with_a_vocabulary_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    is_loaded, closed = threading.Event(), list[ModelRunner]()
    load, close = opened_model.load_runner, CpuRunner.close

    def loaded_first(*args: Any, **options: Any) -> ModelRunner:
        runner = load(*args, **options)
        is_loaded.set()
        return runner

    def refuse(metadata: Mapping[str, Any]) -> Tokenizer:
        assert is_loaded.wait(60)
        raise UnsupportedError("tokenizer.ggml.pre")

    def noted(runner: CpuRunner) -> None:
        closed.append(runner)
        close(runner)

    read_as_for_a_gpu(monkeypatch)
    monkeypatch.setattr(opened_model, "load_runner", loaded_first)
    monkeypatch.setattr(Tokenizer, "from_metadata", refuse)
    monkeypatch.setattr(CpuRunner, "close", noted)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(UnsupportedError, match="pre"):
        open_model(CONFIG_OF_DEMO)
    assert len(closed) == 1
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
