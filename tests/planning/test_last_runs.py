"""What a run took is kept when its model is closed, and printed by the next plan."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from builders import Dims, write_gguf
from coldstream.engine import LLM, EngineConfig, SamplingParams, open_model
from coldstream.engine.opened_model import OpenedModel
from coldstream.placement.cost import unstamped_seconds
from coldstream.placement.forecast import forecast
from coldstream.placement.lock_file import last_refusal, lock_path
from coldstream.placement.run_file import LastRun, Observed, decode_of, last_runs, runs_path
from coldstream.planning import last_runs as module
from coldstream.planning.last_runs import LEAST_STEPS, keep_lock, keep_observed
from coldstream.planning.planned import Planned
from host_device import HostDevice
from host_gpu import MACHINE, opened_on

DIMS = Dims(layers=2, hidden=128, experts=64, experts_used=3, expert_ffn=128, shared_ffn=64)
PARTLY = 456 << 20
OBSERVED = Observed(LEAST_STEPS, 0.5, 2.0, None)


@pytest.fixture
def opened(
    tmp_path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenedModel]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (path,) = write_gguf(tmp_path / "small.gguf", dims=DIMS)
    config = EngineConfig(str(path), device="cuda", ctx_size=96, vram=PARTLY, threads=1, parallel=1)
    with opened_on(compiled_for_the_host):
        yield open_model(config)


def kept(opened: OpenedModel) -> tuple[LastRun, ...]:
    return last_runs(MACHINE, opened.planned.plan.model.fingerprint, runs_path())[1]


def test_a_model_that_is_closed_keeps_what_its_steps_took(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_STEPS", 8)
    with LLM.from_opened(opened) as llm:
        llm.generate([7, 5, 3], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        observed, uses = opened.runner.observed, opened.runner.expert_uses
        assert observed is not None
        assert uses is not None
    (run,) = kept(opened)
    assert run.vram_bytes == PARTLY
    assert (run.steps, run.step_s) == (observed.steps, observed.seconds / observed.steps)
    assert run.cpu_factor == observed.cpu_factor
    assert 0 <= run.hit_rate <= 1
    assert run.expected_s > 0


def test_a_run_that_says_nothing_is_not_kept(opened: OpenedModel) -> None:
    planned = opened.planned
    opened.close()
    for observed in (
        None,
        replace(OBSERVED, steps=LEAST_STEPS - 1),
        replace(OBSERVED, seconds=-1.0),
        replace(OBSERVED, cpu_factor=float("inf")),
    ):
        keep_observed(planned, observed, (1, 2))
    assert kept(opened) == ()
    keep_observed(planned, OBSERVED, (1, 3))
    assert [(run.hit_rate, run.cpu_factor) for run in kept(opened)] == [(0.25, 2.0)]


def decode_of_runs(planned: Planned, path: Path) -> tuple[float, int] | None:
    """As `coldstream plan` asks for it."""
    _, runs = last_runs(planned.hardware, planned.plan.model.fingerprint, path)
    expected_s = 1 / forecast(planned.plan, planned.known, pool=planned.run.pool).decode
    unstamped_s = unstamped_seconds(planned.known.model, planned.known.rates)
    return decode_of(runs, planned.plan.budget_bytes, expected_s, unstamped_s)


def test_decoding_as_the_last_runs_went_is_of_the_same_plan(opened: OpenedModel, tmp_path: Path) -> None:
    planned, path = opened.planned, tmp_path / "runs.json"
    opened.close()
    assert decode_of_runs(planned, path) is None
    for seconds in (0.4, 0.5, 3.0):
        keep_observed(planned, replace(OBSERVED, seconds=seconds * LEAST_STEPS), None, path)
    tok_s, number = decode_of_runs(planned, path) or (0.0, 0)
    assert number == 3
    assert 0.9 / 0.5 < tok_s < 1 / 0.5, "the median, and what is outside of the layers"
    placement = replace(planned.plan, budget_bytes=planned.plan.budget_bytes + 1)
    assert decode_of_runs(replace(planned, run=replace(planned.run, placement=placement)), path) is None
    assert planned.hardware.gpu is not None
    slower = replace(planned.hardware, gpu=replace(planned.hardware.gpu, copy_bytes_per_s=1e9))
    assert decode_of_runs(replace(planned, hardware=slower), path) is None, "another forecast"


def test_a_place_that_cannot_be_written_disturbs_nobody(opened: OpenedModel, tmp_path: Path) -> None:
    opened.close()
    keep_observed(opened.planned, OBSERVED, None, tmp_path)


def test_a_refused_lock_is_kept_and_forgotten_by_a_model_for_which_all_is_locked(
    opened: OpenedModel, tmp_path: Path
) -> None:
    hardware, path = opened.planned.hardware, lock_path()
    assert last_refusal(hardware, path) is None
    keep_lock(opened.planned, (20, 8))
    assert last_refusal(hardware, path) is not None
    keep_lock(opened.planned, None)
    assert last_refusal(hardware, path) is not None, "of a model that needs no lock"
    opened.close()
    assert last_refusal(hardware, path) is None
    (tmp_path / "file").touch()
    keep_lock(opened.planned, (20, 8), tmp_path / "file" / "lock.json")  # disturbs nobody
