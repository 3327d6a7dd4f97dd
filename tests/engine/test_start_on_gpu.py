"""What `open_model` begins before it is needed, on a GPU on the host."""

from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from builders import Dims, write_gguf
from coldstream.engine import LLM, EngineConfig, SamplingParams, open_model, opened_model
from coldstream.engine.opened_model import FirstPrompt
from coldstream.errors import InvalidRequestError, UnsupportedError
from coldstream.experts.file_lock import FileLock
from coldstream.models.cuda import kept_counts, memory_plan
from coldstream.models.cuda.memory_plan import CudaMemoryPlan, count_memory
from coldstream.planning import machine
from host_device import HostDevice
from host_gpu import opened_on

DIMS = Dims(hidden=128, experts=16, experts_used=3, expert_ffn=128, shared_ffn=64)
PARTLY, WHOLLY = "454M", "1G"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (path,) = write_gguf(tmp_path / "small.gguf", dims=DIMS)
    return path


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The begin of each lock and plan, where the GPU is taken to lack a part of the file."""
    found: list[str] = []
    begin, plan = FileLock.__init__, opened_model.plan_model

    def locked(lock: FileLock, *arguments: Any, **options: Any) -> None:
        found.append("lock")
        begin(lock, *arguments, **options)

    def planned(*arguments: Any, **options: Any) -> Any:
        found.append("plan")
        return plan(*arguments, **options)

    monkeypatch.setattr(FileLock, "__init__", locked)
    monkeypatch.setattr(opened_model, "plan_model", planned)
    monkeypatch.setattr(opened_model, "is_sure_to_map", lambda *_: True)
    return found


@pytest.mark.sharded
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("vram", [PARTLY, WHOLLY])
def test_the_file_is_locked_before_a_plan_is_made(
    path: Path,
    events: list[str],
    compiled_for_the_host: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
    is_known: bool,
    vram: str,
) -> None:
    """But not while the machine is measured; and what the GPU holds after all is not locked."""
    monkeypatch.setattr(opened_model, "rates_are_known", lambda _: is_known)
    with opened_on(compiled_for_the_host):
        registered = compiled_for_the_host.driver.registered
        with LLM(path, device="cuda", ctx_size=128, vram=vram, threads=1) as llm:
            assert llm.opened.plan.placement.is_all_resident == (vram == WHOLLY)
            assert events[0] == ("lock" if is_known else "plan")
            assert bool(registered) == (vram == PARTLY)
        assert not registered


def test_a_model_that_is_refused_leaves_nothing_locked(
    path: Path, events: list[str], compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise UnsupportedError("no kernels")

    monkeypatch.setattr(opened_model, "rates_are_known", lambda _: True)
    monkeypatch.setattr(opened_model, "load_runner", refuse)
    with opened_on(compiled_for_the_host):
        with pytest.raises(UnsupportedError, match="no kernels"):
            open_model(EngineConfig(str(path), device="cuda", ctx_size=128, vram=PARTLY))
        assert events == ["lock", "plan"]
        assert not compiled_for_the_host.driver.registered


@pytest.mark.sharded(of="models on a GPU")
def test_an_early_start_answers_as_any_other(
    path: Path, events: list[str], compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first steps are the caller's, and come before the file is locked."""
    monkeypatch.setattr(opened_model, "rates_are_known", lambda _: True)
    config = EngineConfig(str(path), device="cuda", ctx_size=128, vram=PARTLY, threads=1)
    answers, captured = [], []
    with opened_on(compiled_for_the_host):
        registered = compiled_for_the_host.driver.registered
        for is_early in (False, True):
            with LLM.from_opened(open_model(config, is_early=is_early)) as llm:
                assert not llm.opened.plan.placement.is_all_resident
                captured.append(llm.opened.runner.num_captured)
                assert bool(registered) == (not is_early)
                answers.append(
                    [
                        llm.generate(ids, SamplingParams(temperature=0, max_tokens=6))[0].token_ids
                        for ids in ([7, 300, 5], [7, 300, 5], list(range(40, 120)))
                    ]
                )
    assert captured[0] > captured[1] == 0
    assert events == ["lock", "plan", "plan", "lock"]
    assert answers[0] == answers[1]


def test_a_start_for_one_answer_measures_nothing_before_it(
    path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does it compile the kernel of a measurement. Its answer is that of any other start."""
    config = EngineConfig(str(path), device="cuda", ctx_size=128, vram=PARTLY, threads=1)
    greedy, answers = SamplingParams(temperature=0, max_tokens=6), []

    def refuse(*_: object) -> None:
        raise AssertionError("it waits for a measurement")

    monkeypatch.setattr(machine, "with_stored_rates", lambda *_: None)
    for prompt in (None, FirstPrompt("def")):
        with opened_on(compiled_for_the_host), pytest.MonkeyPatch.context() as patch:
            if prompt:
                patch.setattr(opened_model, "with_rates", refuse)
                patch.setattr(opened_model, "compiling_for_rates", refuse)
            with LLM.from_opened(open_model(config, is_early=True, prompt=prompt)) as llm:
                late = llm.opened.late_rates
                assert (late is not None and late.are_assumed) == (prompt is not None)
                answers.append(llm.generate([7, 300, 5], greedy)[0].token_ids)
                experts = llm.opened.runner.gpu_experts
                assert experts is not None
                # Rates that are assumed, or were measured under load, are a beginning.
                is_doubtful = llm.opened.planned.hardware.has_doubtful_rates
                assert is_doubtful or not prompt
                assert (experts.shares is not None) == is_doubtful
    assert answers[0] == answers[1]


@pytest.mark.sharded(of="models on a GPU")
def test_a_start_without_missing_experts_needs_no_rates(
    path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing is measured behind its answer either."""
    monkeypatch.setattr(machine, "with_stored_rates", lambda *_: None)
    config = EngineConfig(str(path), device="cuda", ctx_size=128, vram=WHOLLY, threads=1)
    with opened_on(compiled_for_the_host), closing(open_model(config, prompt=FirstPrompt("def"))) as opened:
        assert opened.plan.placement.is_all_resident
        assert opened.late_rates is not None
        assert not opened.late_rates.are_assumed


def test_kernels_are_compiled_for_about_as_many_rows_as_the_first_prompt_has(
    path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its template among them. Without a prompt there is no such number."""
    asked: list[int | None] = []
    load = opened_model.load_runner

    def loaded(*arguments: Any, first_rows: int | None, **options: Any) -> Any:
        asked.append(first_rows)
        return load(*arguments, first_rows=first_rows, **options)

    monkeypatch.setattr(opened_model, "load_runner", loaded)
    config = EngineConfig(str(path), device="cuda", ctx_size=128, vram=WHOLLY, threads=1)
    with opened_on(compiled_for_the_host):
        open_model(config).close()
        for is_raw in (False, True):
            open_model(config, prompt=FirstPrompt("a text " * 9, is_raw=is_raw)).close()
    nothing, with_template, raw = asked
    assert nothing is None
    assert 9 <= raw == with_template - opened_model.TEMPLATE_TOKENS


def test_tokens_of_a_first_prompt_are_counted_where_they_can_be() -> None:
    read: Future[Any] = Future()
    text, metadata = FirstPrompt("x" * 40), {"tokenizer.chat_template": "of any kind"}
    assert text.num_tokens(read, {}) == 40 // opened_model.CHARS_PER_TOKEN
    assert text.num_tokens(read, metadata) == text.num_tokens(read, {}) + opened_model.TEMPLATE_TOKENS
    read.set_result(Counted())
    assert text.num_tokens(read, {}) == 40
    assert FirstPrompt("").num_tokens(read, {}) == 1
    assert FirstPrompt("refused").num_tokens(read, {}) == 1
    assert FirstPrompt("x" * (opened_model.MAX_COUNTED_CHARS + 4)).num_tokens(read, {}) == 1025


class Counted:
    """A tokenizer with a token for each character."""

    def encode(self, text: str) -> list[int]:
        if text == "refused":
            raise InvalidRequestError("a lone surrogate")
        return list(range(len(text)))


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
def test_an_early_start_reads_the_vocabulary_beside_loading(
    path: Path,
    compiled_for_the_host: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
    is_early: bool,
    is_known: bool,
) -> None:
    """Unless the tokens of its prompt are asked for before. Other starts have it read beside planning."""
    events: list[str] = []
    monkeypatch.setattr(opened_model, "rates_are_known", lambda _: is_known)
    for name in ("_begin_reading", "plan_model", "load_runner"):
        noted(monkeypatch, name, events)
    config = EngineConfig(str(path), device="cuda", ctx_size=128, vram=WHOLLY, threads=1)
    with opened_on(compiled_for_the_host):
        open_model(config, is_early=is_early).close()
    reading = ["plan_model", "_begin_reading"] if is_early and is_known else ["_begin_reading", "plan_model"]
    assert events == [*reading, "load_runner"]


def noted(monkeypatch: pytest.MonkeyPatch, name: str, events: list[str]) -> None:
    """Notes calls of a function of the module."""
    call = getattr(opened_model, name)
    monkeypatch.setattr(opened_model, name, lambda *of, **by: (events.append(name), call(*of, **by))[1])


@pytest.mark.parametrize("vram", [PARTLY, WHOLLY])
def test_an_early_start_counts_no_memory_again(
    path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vram: str
) -> None:
    """Its plan is that of any other start, which counts by itself."""
    num_counted, plans = [0], []

    def counted(*sizes: Any) -> CudaMemoryPlan:
        num_counted[0] += 1
        return count_memory(*sizes)

    config = EngineConfig(str(path), device="cuda", ctx_size=128, vram=vram, threads=1)
    with opened_on(compiled_for_the_host):
        monkeypatch.setattr(kept_counts, "directory_of", lambda kept: tmp_path / "kept" / kept.folder)
        for module in (kept_counts, memory_plan):
            monkeypatch.setattr(module, "count_memory", counted)
        for is_early, has_counted in ((True, True), (True, False), (False, True)):
            num_counted[0] = 0
            with closing(open_model(config, is_early=is_early)) as opened:
                plans.append(opened.plan)
                assert bool(num_counted[0]) == has_counted
    assert plans[0] == plans[1] == plans[2]
