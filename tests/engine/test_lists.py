"""A list of prompts of one LLM: each answer is what it is alone, whatever is beside it."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Thread

import numpy as np
import pytest

from bench.runners import open_cpu_runner
from builders import write_gguf
from coldstream.decoding import Logits, derived_seed
from coldstream.engine import LLM, CompletionOutput, SamplingParams
from coldstream.engine.engine import Engine
from coldstream.engine.events import Event
from coldstream.engine.limits import EngineLimits
from coldstream.errors import GenerationFault, InvalidRequestError, OutOfMemoryError
from coldstream.kvcache import Batch, CacheSize
from coldstream.models.cpu.runner import CpuRunner
from hash_runner import opened_with
from plain_loop import plain_output
from ram_budgets import least_ram

CONTEXT = 640
ROOMY = CacheSize(num_blocks=24, num_states=8)
TIGHT = CacheSize(num_blocks=4, num_states=3)
SAMPLED = SamplingParams(seed=5, max_tokens=12, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("side") / "tiny.gguf")[0]


@contextmanager
def opened(
    path: Path, size: CacheSize = ROOMY, *, threads: int = 2, ram_bytes: int | None = None
) -> Iterator[LLM]:
    runner = open_cpu_runner(
        path, threads=threads, context_length=CONTEXT, ram_bytes=ram_bytes, cache_size=size
    )
    with LLM.from_opened(opened_with(runner, CONTEXT)) as llm:
        yield llm


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with opened(path) as llm:
        yield llm


def runner_of(llm: LLM) -> CpuRunner:
    runner = llm.opened.runner
    assert isinstance(runner, CpuRunner)
    return runner


def left_in_use(llm: LLM) -> tuple[int, int]:
    """Blocks and states that somebody has beside kept prefixes."""
    llm.forget()
    return sequences_in_use(llm)


def sequences_in_use(llm: LLM) -> tuple[int, int]:
    """Blocks and states that somebody has."""
    sequences = runner_of(llm)._sequences
    blocks, states = (pool.num_blocks - pool.num_free for pool in (sequences.blocks, sequences.states))
    return blocks, states


def steps_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows of each sequence of every step from now on."""
    steps: list[list[int]] = []
    runner = runner_of(llm)
    step = runner.step

    def counted(batch: Batch) -> tuple[Logits, ...]:
        steps.append([len(segment.token_ids) for segment in batch.segments])
        return step(batch)

    monkeypatch.setattr(runner, "step", counted)
    return steps


def random_prompts(count: int, longest: int, seed: int = 1) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(256) for _ in range(random.randint(1, longest))] for _ in range(count)]


def mixed_params(count: int) -> list[SamplingParams]:
    """Greedy and sampled ones, with penalties, stops, several answers and log-probabilities."""
    random = Random(2)
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 0, "min_p": 0.0},
        {"n": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"stop": ["e", "a", "1"], "min_tokens": 3, "logprobs": 2},
        {"n": 3, "logprobs": 0, "presence_penalty": 0.7},
        {"stop_token_ids": list(range(0, 320, 9)), "temperature": 1.5, "top_p": 1.0},
    )
    return [
        SamplingParams(seed=random.randrange(2**40), max_tokens=random.randint(3, 40), **kind)  # type: ignore[arg-type]
        for kind in itertools.islice(itertools.cycle(kinds), count)
    ]


Answer = tuple[object, ...]


def answer_of(output: CompletionOutput) -> Answer:
    """All that an answer says but for times and what was reused."""
    statistics = output.statistics
    counts = (statistics.prompt_tokens, statistics.generated_tokens, statistics.seed, statistics.threads)
    return (*(value for name, value in vars(output).items() if name not in ("index", "statistics")), counts)


def together(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[Answer]]:
    outputs = llm.generate(prompts, params)
    assert [list(output.prompt_token_ids) for output in outputs] == [list(prompt) for prompt in prompts]
    assert all([each.index for each in out.outputs] == list(range(len(out.outputs))) for out in outputs)
    return [[answer_of(each) for each in output.outputs] for output in outputs]


def alone(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[Answer]]:
    """Each answer by the plain loop."""

    def answer(prompt: list[int], each: SamplingParams, index: int) -> Answer:
        assert each.seed is not None
        own = replace(each, n=1, seed=derived_seed(each.seed, index))
        return answer_of(plain_output(llm.opened, prompt, own))

    return [
        [answer(prompt, each, index) for index in range(each.n)]
        for prompt, each in zip(prompts, params, strict=True)
    ]


@pytest.mark.sharded
@pytest.mark.parametrize("size", [ROOMY, TIGHT, CacheSize(3, 1)], ids=["roomy", "tight", "one"])
@pytest.mark.parametrize("threads", [1, 2])
def test_32_prompts_are_each_what_they_are_alone(path: Path, size: CacheSize, threads: int) -> None:
    prompts, params = random_prompts(32, 290), mixed_params(32)
    with opened(path, size, threads=threads) as llm:
        expected = alone(llm, prompts, params)
        assert together(llm, prompts, params) == expected
        assert left_in_use(llm) == (0, 0)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("size", [CacheSize(12, 6), TIGHT], ids=["roomy", "tight"])
def test_with_experts_on_the_disk_too(path: Path, size: CacheSize) -> None:
    prompts, params = random_prompts(14, 100, seed=3), mixed_params(14)
    with opened(path) as llm:
        expected = alone(llm, prompts, params)
    least = least_ram(path, context_length=CONTEXT) + 5 * 2**19
    with opened(path, size, ram_bytes=least) as llm:
        assert runner_of(llm).disk is not None
        assert together(llm, prompts, params) == expected
        assert runner_of(llm).disk.misses > 0  # type: ignore[union-attr]


def test_each_step_has_a_row_of_every_sequence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of(llm, monkeypatch)
    llm.generate([[1, 2, 3], [4], [5, 6], [7, 8]], SAMPLED)
    assert [sorted(rows) for rows in steps] == [[1, 2, 2, 3]] + [[1] * 4] * 11


def test_prompts_are_read_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step does not end before the last token, where a checkpoint is left for later prompts."""
    steps = steps_of(llm, monkeypatch)
    llm.generate([[1] * 100, [2] * 80], replace(SAMPLED, max_tokens=2))
    assert [sorted(rows) for rows in steps] == [[80, 100], [1, 1]]


def test_a_list_may_be_longer_than_a_queue(llm: LLM) -> None:
    limits = EngineLimits()
    count = limits.max_waiting + limits.max_running + 9
    params = replace(SAMPLED, max_tokens=1)
    outputs = llm.generate([[each % 256, each // 256] for each in range(count)], params)
    assert [len(output.token_ids) for output in outputs] == [1] * count
    assert left_in_use(llm) == (0, 0)


def test_no_answer_waits_in_the_engine_where_there_is_room_for_those_that_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a step whose tokens a device chooses is launched ahead only if nobody waits."""
    step, waiting = Engine.step, []

    def counted(engine: Engine) -> list[Event]:
        events = step(engine)
        waiting.append(engine.statistics().waiting)
        return events

    monkeypatch.setattr(Engine, "step", counted)
    llm.generate([[each] for each in range(20)], replace(SAMPLED, max_tokens=3))
    assert max(waiting) == 0


def test_prompts_wait_where_memory_is_too_little_for_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one gives its blocks back when the first one needs them, and computes them anew."""
    prompts = [[1] * 500, [2] * 500, [3]]
    params = replace(SAMPLED, max_tokens=30)
    with opened(path, TIGHT) as llm:
        expected = alone(llm, prompts, [params] * 3)
        steps = steps_of(llm, monkeypatch)
        assert together(llm, prompts, [params] * 3) == expected
    assert max(map(len, steps)) == 2
    rows = sum(map(sum, steps))
    assert rows > 1001 + 3 * 29, "something was computed twice"


def test_answers_to_one_prompt_share_its_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,), params = [random_prompts(1, 290)[0] + [9] * 40], replace(SAMPLED, n=3)
    expected = alone(llm, [prompt], [params])
    steps = steps_of(llm, monkeypatch)
    outputs = llm.generate([prompt], params)[0].outputs
    assert [answer_of(each) for each in outputs] == expected[0]
    assert steps == [[len(prompt)]] + [[1] * 3] * 11 + [[1] * 2]
    assert [each.statistics.reused_tokens for each in outputs] == [0] + [len(prompt) - 1] * 2


@pytest.mark.parametrize("size", [ROOMY, CacheSize(3, 1)], ids=["roomy", "one"])
def test_prompts_begin_with_an_earlier_answer(path: Path, size: CacheSize) -> None:
    with opened(path, size) as llm:
        first = llm.generate([list(range(9))], SAMPLED)[0]
        said = [*first.prompt_token_ids, *first.token_ids]
        prompts = [[*said, 1, 2], [7, 7], [*said, 3]]
        outputs = llm.generate(prompts, SAMPLED)
        found = [output.statistics.reused_tokens for output in outputs]
        assert found == [len(said) - 1, 0, len(said) - 1 if size is ROOMY else 0]
        longer = [*prompts[2], *outputs[2].token_ids, 5]
        assert llm.generate([longer], SAMPLED)[0].statistics.reused_tokens == len(longer) - 2
        llm.forget()
        assert [[answer_of(output.outputs[0])] for output in outputs] == alone(llm, prompts, [SAMPLED] * 3)


def test_an_error_is_the_one_of_the_first_prompt_that_has_one(llm: LLM) -> None:
    def failing_at(length: int, what: str) -> SamplingParams:
        def fail(token_ids: Sequence[int], logits: Logits) -> Logits:
            if len(token_ids) == length:
                raise ValueError(what)
            return logits

        return replace(SAMPLED, logits_processors=[fail])

    params = [SAMPLED, failing_at(9, "late"), failing_at(3, "early"), replace(SAMPLED, max_tokens=300)]
    lists = [
        params,
        [failing_at(3, "late"), failing_at(3, "as early")],
        [SAMPLED, failing_at(3, "late"), failing_at(3, "as early")],  # in one step, before the list is done
        [failing_at(9, "late"), replace(SAMPLED, max_tokens=2)],  # beside an answer that is finished
    ]
    for each in lists:
        with pytest.raises(InvalidRequestError, match="raised ValueError: late"):
            llm.generate([[1, 2]] * len(each), each)
        assert left_in_use(llm) == (0, 0)


def test_nothing_is_computed_for_prompts_after_one_with_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(token_ids: Sequence[int], logits: Logits) -> Logits:
        if len(token_ids) == 4:
            raise ValueError("early")
        return logits

    steps = steps_of(llm, monkeypatch)
    params = [SAMPLED, replace(SAMPLED, logits_processors=[fail]), SAMPLED]
    with pytest.raises(InvalidRequestError, match="early"):
        llm.generate([[1, 2]] * 3, params)
    assert [len(rows) for rows in steps] == [3] * 3 + [1] * 9


def test_a_list_after_a_prompt_that_failed(llm: LLM) -> None:
    """No token was chosen after those that its sequence has, so that no prompt may begin with them."""

    def fail(token_ids: Sequence[int], logits: Logits) -> Logits:
        raise ValueError("at once")

    prompts = [[1] * 40, [2]]
    with pytest.raises(InvalidRequestError, match="at once"):
        llm.generate([[1] * 30], replace(SAMPLED, logits_processors=[fail]))
    assert left_in_use(llm) == (0, 0)
    assert together(llm, prompts, [SAMPLED] * 2) == alone(llm, prompts, [SAMPLED] * 2)


@pytest.mark.parametrize("row", [0, 2])
def test_damaged_logits_of_one_end_the_list(llm: LLM, monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    prompts = random_prompts(3, 20)
    step, num_steps = runner_of(llm).step, itertools.count()

    def damaged(batch: Batch) -> tuple[Logits, ...]:
        logits = step(batch)
        if next(num_steps) == 4:
            logits[row][:] = np.nan
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(runner_of(llm), "step", damaged)
        with pytest.raises(GenerationFault):
            llm.generate(prompts, SAMPLED)
    assert left_in_use(llm) == (0, 0)
    assert together(llm, prompts, [SAMPLED] * 3) == alone(llm, prompts, [SAMPLED] * 3)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_step_leaves_no_sequence(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    logits_of, num_runs = runner_of(llm)._logits_of, itertools.count()

    def interrupted(rows: np.ndarray) -> Logits:
        if next(num_runs) == 3:
            raise error
        return logits_of(rows)

    with monkeypatch.context() as patched:
        patched.setattr(runner_of(llm), "_logits_of", interrupted)
        with pytest.raises((KeyboardInterrupt, OutOfMemoryError)):
            llm.generate([[1], [2, 3], [4]], SAMPLED)
    assert left_in_use(llm) == (0, 0)


def test_closing_ends_a_list_between_two_steps(path: Path) -> None:
    closing: list[Thread] = []

    def close(token_ids: Sequence[int], logits: Logits) -> Logits:
        if not closing:
            closing.append(Thread(target=llm.close))
            closing[0].start()
        return logits

    with opened(path) as llm:
        with pytest.raises(InvalidRequestError, match="closed"):
            llm.generate([[1], [2]], replace(SAMPLED, max_tokens=600, logits_processors=[close]))
        closing[0].join()
        assert sequences_in_use(llm) == (0, 0)


def test_an_empty_list_gives_an_empty_list(llm: LLM) -> None:
    assert llm.generate([]) == []
