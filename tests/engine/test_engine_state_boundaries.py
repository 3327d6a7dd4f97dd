"""An engine crosses the checkpoints of a prompt: same tokens, same prefixes, fewer steps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engine_clients import Answer, Client, FakeClock, alone, engine_of
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.runners import open_cpu_runner
from builders import write_gguf
from coldstream.engine import LLM, OpenedModel, SamplingParams, job, model_steps
from coldstream.engine.engine import Engine
from coldstream.engine.limits import EngineLimits
from coldstream.engine.served_requests import JobMemory
from coldstream.errors import DeviceError
from coldstream.kvcache import Batch, CacheSize, Segment
from coldstream.models.cpu.runner import CpuRunner
from hash_runner import opened_with

CONTEXT = 800
SAMPLED = SamplingParams(seed=5, max_tokens=6, temperature=1.0, ignore_eos=True)
PROMPT = [each % 256 for each in range(0, 3 * 300, 3)]
NEVER = 10**6
SIZES = {"room": CacheSize(20, 12), "three states": CacheSize(6, 3), "one state": CacheSize(4, 1)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("boundaries") / "tiny.gguf")[0]


def opened_model(path: Path, size: CacheSize) -> OpenedModel:
    return opened_with(open_cpu_runner(path, threads=2, context_length=CONTEXT, cache_size=size), CONTEXT)


@pytest.fixture
def opened(path: Path) -> Iterator[OpenedModel]:
    with LLM.from_opened(opened_model(path, SIZES["room"])) as llm:
        yield llm.opened


def rows_of_steps(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows of the segments of each step from now on."""
    steps: list[list[int]] = []
    step = CpuRunner.step

    def counted(self: CpuRunner, batch: Batch) -> object:
        steps.append([len(segment.token_ids) for segment in batch.segments])  # type: ignore[arg-type]
        return step(self, batch)

    monkeypatch.setattr(CpuRunner, "step", counted)
    return steps


def kept_lengths(client: Client) -> list[int]:
    return sorted(each.node.length for each in client.engine._served.memory.cache._kept)


def served(
    opened: OpenedModel, prompts: Sequence[tuple[list[int], tuple[int, ...], int]]
) -> tuple[list[list[Answer]], list[int], object]:
    """Answers to prompts with boundaries in sequence, what is kept then, and how often it was found."""
    with engine_of(opened, EngineLimits(target_step_ms=1000)) as client:
        answers, reused = [], []
        for prompt, boundaries, n in prompts:
            request = client.add(prompt, replace(SAMPLED, n=n), boundaries=boundaries)
            client.drain()
            answers.append(client.answers(request))
            reused += [output.statistics.reused_tokens for output in client.outputs(request)]
        return answers, [*reused, -1, *kept_lengths(client)], client.engine.statistics().prefixes


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_tokens_and_prefixes_are_those_of_steps_that_end_there(path: Path, size: CacheSize) -> None:
    @settings(max_examples=12, deadline=None)
    @given(data=st.data())
    def check(opened: OpenedModel, data: st.DataObject) -> None:
        prompts = []
        for _ in range(data.draw(st.integers(1, 3))):
            parts = data.draw(st.lists(st.sampled_from((1, 9, 40, 120)), min_size=1, max_size=3))
            prompt = PROMPT[: sum(parts)] + [data.draw(st.integers(0, 2))] * data.draw(st.integers(1, 60))
            ends = (sum(parts[: i + 1]) for i in range(len(parts)))
            boundaries = tuple(end for end in ends if end <= len(prompt))
            prompts.append((prompt, boundaries, data.draw(st.sampled_from((1, 1, 2)))))
        found = served(opened, prompts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "MIN_FORK_ROWS", NEVER)
            expected = served(opened, prompts)
        # Where memory is short, it may be another prefix that gives way.
        assert found[: 3 if size == SIZES["room"] else 1] == expected[: 3 if size == SIZES["room"] else 1]

    with LLM.from_opened(opened_model(path, size)) as llm:
        check(llm.opened)


def test_a_first_token_takes_one_step(opened: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(opened) as client:
        steps = rows_of_steps(client, monkeypatch)
        first = client.add(PROMPT[:110], SAMPLED, boundaries=(40, 60))
        client.step()
        assert (steps, len(client.tokens_so_far(first))) == ([[110]], 1)
        assert kept_lengths(client) == [40, 60, 109]
        client.drain()
        assert kept_lengths(client) == [40, 60, 109, 115]
        again = client.add([*PROMPT[:60], 7, 7], SAMPLED)
        client.drain()
        assert client.num_reused(again) == 60


def test_prefixes_in_the_block_that_an_answer_goes_on_in_make_way_for_it(path: Path) -> None:
    with LLM.from_opened(opened_model(path, CacheSize(3, 12))) as llm, engine_of(llm.opened) as client:
        request = client.add(PROMPT[:110], SAMPLED, boundaries=(40, 60))
        client.step()
        assert kept_lengths(client) == [40, 60, 109]
        other = llm.opened.runner.new_sequence()
        llm.opened.runner.step(Batch((Segment(other, [1] * 300),)))
        assert llm.opened.runner.free.num_blocks == 0
        client.drain()
        llm.opened.runner.release(other)
        assert client.error(request) is None
        assert client.answers(request) == alone(llm, PROMPT[:110], SAMPLED)


def test_a_step_ends_at_a_checkpoint_that_is_too_near(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(opened) as client:
        steps = rows_of_steps(client, monkeypatch)
        client.add(PROMPT * 2, SAMPLED, boundaries=(300, 520))
        for _ in range(3):
            client.step()
        assert steps == [[512], [8], [80]]
        assert kept_lengths(client) == [300, 520, 599]
        client.drain()


def test_where_a_state_is_lacking_the_step_ends_at_the_first_boundary_without_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM.from_opened(opened_model(path, CacheSize(8, 4))) as llm:
        wanted = alone(llm, PROMPT[:200], SAMPLED)
        with engine_of(llm.opened) as client:
            others = [llm.opened.runner.new_sequence() for _ in range(2)]
            for each in others:
                llm.opened.runner.step(Batch((Segment(each, [1]),)))
            steps = rows_of_steps(client, monkeypatch)
            request = client.add(PROMPT[:200], SAMPLED, boundaries=(100,))
            client.step()
            assert steps == [[199]], "its state, and that at 100"
            client.drain()
            for each in others:
                llm.opened.runner.release(each)
            assert client.answers(request) == wanted


def fail(*_: object) -> None:
    raise DeviceError("made to fail")


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("part", ["_run_trunk", "_logits_of"])
def test_a_step_that_fails_leaves_no_fork(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    with engine_of(opened) as client:
        request = client.add(PROMPT, SAMPLED, boundaries=(40, 60))
        with monkeypatch.context() as patch:
            patch.setattr(CpuRunner, part, fail)
            client.step()
        assert isinstance(client.error(request), DeviceError)
        assert kept_lengths(client) == []
        assert opened.runner.free == SIZES["room"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (model_steps, "begin_choices"),
        (Engine, "_may_run_ahead"),
        (Engine, "_take_outcomes"),
        (model_steps.LaunchedStep, "outcomes"),
        (JobMemory, "keep_fork"),
        (CpuRunner, "_run_trunk"),
    ],
)
def test_an_interruption_anywhere_leaves_no_fork_and_the_same_tokens(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    wanted = alone(LLM.from_opened(opened), PROMPT, SAMPLED)
    with engine_of(opened) as client:
        request = client.add(PROMPT, SAMPLED, boundaries=(40, 60))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.step()
        kept = len(kept_lengths(client))
        assert opened.runner.free.num_states >= SIZES["room"].num_states - 1 - kept
        client.drain()
        assert client.answers(request) == wanted


def test_a_cancelled_request_leaves_what_its_last_step_has_kept(opened: OpenedModel) -> None:
    with engine_of(opened, clock=FakeClock()) as client:
        request = client.add(PROMPT, SAMPLED, boundaries=(40,))
        client.step()
        client.engine.cancel(request)
        client.drain()
        assert {40, len(PROMPT) - 1} <= set(kept_lengths(client))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_is_not_finite_is_not_kept(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """is_cancelled: while the step is under way."""
    logits_of = CpuRunner._logits_of

    def poisoned(self: CpuRunner, rows: object) -> object:
        if is_cancelled:
            client.engine.cancel(request)
        return logits_of(self, rows) * float("nan")  # type: ignore[arg-type]

    monkeypatch.setattr(CpuRunner, "_logits_of", poisoned)
    with engine_of(opened) as client:
        request = client.add(PROMPT, SAMPLED, boundaries=(40, 60))
        client.drain()
        assert is_cancelled or client.error(request) is not None
        assert kept_lengths(client) == []
