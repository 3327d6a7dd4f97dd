"""What goes wrong in an engine stays with those concerned: errors, deadlines, a full queue, interruptions."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_clients import FakeClock, alone, engine_of

from bench.runners import open_cpu_runner
from builders import write_gguf
from coldstream.decoding import Logits
from coldstream.engine import LLM, OpenedModel, SamplingParams
from coldstream.engine.answer import Request
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta
from coldstream.engine.limits import EngineLimits
from coldstream.engine.request_reader import RequestReader
from coldstream.engine.submission import Submission
from coldstream.errors import (
    ColdstreamError,
    ConfigError,
    ContextFullError,
    DeadlineError,
    DeviceError,
    GenerationFault,
    InvalidRequestError,
    ModelChangedError,
    OutOfMemoryError,
    QueueFullError,
)
from coldstream.kvcache import Batch, CacheSize
from hash_runner import opened_with

CONTEXT = 256
SAMPLED = SamplingParams(seed=5, max_tokens=12, temperature=1.0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5], [6] * 40]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("faults") / "tiny.gguf")[0]


@pytest.fixture
def opened(path: Path) -> Iterator[OpenedModel]:
    runner = open_cpu_runner(path, threads=2, context_length=CONTEXT, cache_size=CacheSize(20, 12))
    with LLM.from_opened(opened_with(runner, CONTEXT)) as llm:
        yield llm.opened


def failing_at(length: int) -> SamplingParams:
    def fail(token_ids: Sequence[int], logits: Logits) -> Logits:
        if len(token_ids) == length:
            raise ValueError("made to fail")
        return logits

    return replace(SAMPLED, logits_processors=[fail])


def test_an_error_of_one_request_leaves_the_others_unchanged(opened: OpenedModel) -> None:
    llm = LLM.from_opened(opened)
    wanted = [alone(llm, prompt, SAMPLED) for prompt in PROMPTS]
    with engine_of(opened) as client:
        ids = [client.add(prompt, SAMPLED) for prompt in PROMPTS]
        failing = client.add([7, 7], failing_at(5))
        at_once = client.add([8, 8], failing_at(2))
        client.drain()
        assert [client.answers(each) for each in ids] == wanted
        for each in (failing, at_once):
            error = client.error(each)
            assert isinstance(error, InvalidRequestError)
            assert "made to fail" in str(error)
        assert len(client.tokens_so_far(failing)) == 3
        assert client.engine.statistics().failed_requests == 2


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("at_step", [0, 4])
def test_nf01_ca03_damaged_logits_fail_one_and_are_never_kept(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, row: int, at_step: int
) -> None:
    """Not even where a prompt's prefix would be kept, at the first step."""
    llm = LLM.from_opened(opened)
    wanted = [alone(llm, prompt, SAMPLED) for prompt in PROMPTS]
    step, num_steps = opened.runner.step, itertools.count()

    def damaged(batch: Batch) -> tuple[Logits, ...]:
        logits = step(batch)
        if next(num_steps) == at_step:
            logits[row][:] = np.nan
        return logits

    with engine_of(opened) as client:
        with monkeypatch.context() as patched:
            patched.setattr(opened.runner, "step", damaged)
            ids = [client.add(prompt, SAMPLED) for prompt in PROMPTS]
            client.drain()
        for number, each in enumerate(ids):
            if number == row:
                assert isinstance(client.error(each), GenerationFault)
            else:
                assert client.answers(each) == wanted[number]
        again = client.add(PROMPTS[row], SAMPLED)
        client.drain()
        assert client.answers(again) == wanted[row]
        assert client.num_reused(again) == 0, "any kept prefix may be damaged"


@pytest.mark.sharded(6)
@pytest.mark.parametrize("error", [OutOfMemoryError, DeviceError, ModelChangedError, GenerationFault])
@pytest.mark.parametrize("max_running", [2, 4])
def test_an_error_of_a_whole_step_fails_those_in_it_once(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, error: type[ColdstreamError], max_running: int
) -> None:
    launch, num_steps = opened.runner._launch, itertools.count()

    def failing(segments: object) -> None:
        if next(num_steps) == 4:
            raise error("made to fail")
        launch(segments)  # type: ignore[arg-type]

    llm = LLM.from_opened(opened)
    wanted = alone(llm, PROMPTS[0], SAMPLED)
    with engine_of(opened, EngineLimits(max_running=max_running)) as client, monkeypatch.context() as patched:
        patched.setattr(opened.runner, "_launch", failing)
        both = client.add(PROMPTS[1], replace(SAMPLED, n=2))
        client.step()
        client.step()
        ids = [both, *(client.add(prompt, SAMPLED) for prompt in PROMPTS)]
        client.drain()
        in_it = 1 + (max_running - 2)
        assert [type(client.error(each)) for each in ids[:in_it]] == [error] * in_it
        assert [client.error(each) for each in ids[in_it:]] == [None] * (4 - in_it), "they were not in it"
        again = client.add(PROMPTS[0], SAMPLED)
        client.drain()
        assert client.answers(again) == wanted


@pytest.mark.parametrize("where", ["_launch", "_logits_of", "processor"])
def test_an_interrupted_step_is_taken_again_with_the_same_tokens(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    counting = itertools.count()

    def interrupt_once() -> None:
        if next(counting) == 9:
            raise KeyboardInterrupt

    def processor(token_ids: Sequence[int], logits: Logits) -> Logits:
        if where == "processor":
            interrupt_once()
        return logits

    params = replace(SAMPLED, logits_processors=[processor])
    llm = LLM.from_opened(opened)
    wanted = [alone(llm, prompt, SAMPLED) for prompt in PROMPTS]
    with engine_of(opened) as client, monkeypatch.context() as patched:
        if where != "processor":
            inner = getattr(opened.runner, where)

            def interrupted(*arguments: object) -> object:
                interrupt_once()
                return inner(*arguments)

            patched.setattr(opened.runner, where, interrupted)
        ids = [client.add(prompt, params) for prompt in PROMPTS]
        with pytest.raises(KeyboardInterrupt):
            client.drain()
        client.drain()
        assert [client.answers(each) for each in ids] == wanted


def test_a_request_ends_at_its_deadline(opened: OpenedModel) -> None:
    clock = FakeClock(tick=0.0)
    with engine_of(opened, EngineLimits(max_running=1), clock) as client:
        running = client.add([1], SAMPLED, deadline=clock.now + 5)
        waiting = client.add([2], SAMPLED, deadline=clock.now + 2)
        free = client.add([3], SAMPLED)
        client.step()
        clock.now += 3
        client.step()
        assert isinstance(client.error(waiting), DeadlineError)
        assert "had not begun" in str(client.error(waiting))
        assert not client.is_over(running)
        clock.now += 3
        client.step()
        assert "was not finished" in str(client.error(running))
        client.drain()
        assert client.outputs(free)[0].finish_reason == "length"


def test_sc03_exactly_the_overflow_of_the_queue_is_refused(opened: OpenedModel) -> None:
    """Those that were taken on are all served, and then there is room again."""
    with engine_of(opened, EngineLimits(max_running=4, max_waiting=10)) as client:
        ids = [client.add([each], SAMPLED) for each in range(14)]
        for _ in range(20):
            with pytest.raises(QueueFullError, match="10 requests wait"):
                client.add([9], SAMPLED)
        client.drain()
        assert all(client.outputs(each)[0].finish_reason == "length" for each in ids)
        client.add([9], SAMPLED)
        client.drain()


def test_sc02_one_owner_leaves_room_in_the_queue_for_another(opened: OpenedModel) -> None:
    """Whatever parts of its namespace it names; and its requests that run are not counted as waiting."""
    limits = EngineLimits(max_running=2, max_waiting=10, max_waiting_of_owner=4)
    with engine_of(opened, limits) as client:
        ids = [client.add([each], SAMPLED, namespace=f"a/{each % 3}") for each in range(6)]
        with pytest.raises(QueueFullError, match="4 requests with this API key wait"):
            client.add([9], SAMPLED, namespace="a/new")
        client.step()
        ids += [client.add([each], SAMPLED, namespace="b") for each in range(6)]
        with pytest.raises(QueueFullError, match="10 requests wait"):
            client.add([9], SAMPLED, namespace="c")
        client.drain()
        assert all(client.outputs(each)[0].finish_reason == "length" for each in ids)
        client.add([9], SAMPLED, namespace="a")
        client.drain()


def test_sc02_an_owner_with_many_parts_has_one_share(opened: OpenedModel) -> None:
    with engine_of(opened, EngineLimits(max_running=2)) as client:
        flood = [client.add([each], SAMPLED, namespace=f"a/{each}") for each in range(6)]
        other = client.add([7], SAMPLED, namespace="b")
        ended = []
        while not client.engine.is_idle:
            reported = [event for event in client.step() if isinstance(event, Delta)]
            ended += [event.request_id for event in reported if event.piece.finish_reason is not None]
    assert ended.index(other) <= 3
    assert set(ended) == {*flood, other}


def test_trap_52_bad_submissions_change_nothing(opened: OpenedModel) -> None:
    good = RequestReader(opened).of_prompt([1, 2, 3], "prompt", SAMPLED)

    def changed(**fields: object) -> Request:
        return replace(good, **fields)  # type: ignore[arg-type]

    engine = Engine(opened)
    engine.add(Submission(1, good))
    for bad in (
        Submission(1, good),
        Submission(2, changed(prompt_token_ids=())),
        Submission(2, changed(prompt_token_ids=(-1,))),
        Submission(2, changed(prompt_token_ids=(10**9,))),
        Submission(2, changed(max_tokens=0)),
        Submission(2, changed(max_tokens=CONTEXT - 2)),
        Submission(2, good, boundaries=(4,)),
        Submission(2, good, boundaries=(0,)),
        Submission(2, good, priority=101),
    ):
        with pytest.raises(InvalidRequestError, match="request"):
            engine.add(bad)
    with pytest.raises(ContextFullError, match="ctx-size"):
        engine.add(Submission(2, changed(prompt_token_ids=(1,) * CONTEXT)))
    statistics = engine.statistics()
    assert (statistics.waiting, statistics.running) == (1, 0)
    engine.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        engine.add(Submission(3, good))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_running": 0},
        {"max_running": 65},
        {"max_waiting": 0},
        {"target_step_ms": float("nan")},
        {"target_step_ms": 0},
        {"max_waiting_of_owner": 0},
        {"max_waiting_of_owner": 11, "max_waiting": 10},
    ],
)
def test_limits_are_checked(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        EngineLimits(**limits)  # type: ignore[arg-type]


def test_closing_in_the_middle_gives_all_memory_back(opened: OpenedModel) -> None:
    with engine_of(opened) as client:
        client.add([1] * 99, replace(SAMPLED, n=2))
        client.add([2], SAMPLED)
        client.step()
        client.step()
        client.engine.close()
        assert client.engine.is_idle
        assert client.engine.step() == []
