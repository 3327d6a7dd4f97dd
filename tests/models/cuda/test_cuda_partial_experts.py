"""Experts that the GPU does not hold: residency, the CPU and the bus change speed and no bit."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cuda_runner_cases import open_cuda, open_partly, poisoned_blocks
from one_sequence import OneSequence, chosen_after, step_rows
from runner_cases import VARIANTS, reference_logits, token_ids, write_family, write_variant

from coldstream.assets import demo_model_path
from coldstream.decoding import SamplingParams
from coldstream.errors import ModelChangedError
from coldstream.experts.prefetch import Prefetching
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.runtime import calls
from coldstream.kvcache import CacheSize
from random_residency import RandomResidency

pytestmark = pytest.mark.gpu

PROMPT = tuple(range(200, 240))
SIZE = CacheSize.of(41, 512)
GREEDY = SamplingParams(temperature=0)
# Hot enough that no model repeats itself: a text that does asks for the same experts at each step.
SAMPLED = SamplingParams(temperature=2.0, top_k=200, top_p=0.98)
Answer = tuple[list[int], np.ndarray]


def answer(
    runner: OneSequence, sampling: SamplingParams = GREEDY, count: int = 300, prompt: Sequence[int] = PROMPT
) -> Answer:
    """The tokens after a prompt, and the logits after the last."""
    runner.reset()
    logits = runner.extend(prompt)
    context = list(prompt)
    for _ in range(count):
        token = chosen_after(logits, context, sampling, seed=5)
        context.append(token)
        logits = runner.extend((token,))
    return context[len(prompt) :], np.array(logits)


def assert_same(actual: Answer, expected: Answer) -> None:
    assert actual[0] == expected[0]
    assert np.array_equal(actual[1], expected[1])


class Model(NamedTuple):
    """What a model says with everything resident."""

    path: Path
    greedy: Answer
    sampled: Answer


@pytest.fixture(scope="module", params=["demo", "qwen3moe", "qwen3next", "qwen4exp"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    with open_cuda(path, context_length=512) as runner:
        return Model(path, answer(runner), answer(runner, SAMPLED))


@pytest.fixture(scope="module")
def half(path: Path) -> Iterator[OneSequence]:
    with open_partly(path, 0.5, streamed=0.5, context_length=512, cache_size=SIZE) as runner:
        yield runner


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dense-tied"])
@pytest.mark.parametrize(
    ("share", "streamed", "prefetching"),
    [
        (0.0, 0.0, None),
        (0.0, 1.0, None),
        (0.5, 0.5, None),
        (0.25, 0.0, Prefetching(1, 8)),
        (0.0, 0.5, Prefetching(2, 2)),
    ],
)
def test_every_kind_of_model(
    variant: str, share: float, streamed: float, prefetching: Prefetching | None, tmp_path: Path
) -> None:
    path = write_variant(tmp_path, variant)
    ids = token_ids(70)
    expected = reference_logits(path, ids, "i16").numpy()
    with open_partly(path, share, streamed=streamed, prefetching=prefetching) as runner:
        assert np.array_equal(runner.logits(ids), expected)
        for count in (1, 8, 9, 33, 64):
            runner.reset()
            assert np.array_equal(runner.prefill(ids[:count]), expected[count - 1])
        runner.reset()
        assert np.array_equal(np.stack([runner.decode(token) for token in ids[:20]]), expected[:20])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_trap_10_the_answer_does_not_depend_on_what_is_resident(share: float, model: Model) -> None:
    pinned = (0, 3) if share == 0.25 else ()
    with open_partly(model.path, share, streamed=0.4, context_length=512, pinned=pinned) as runner:
        assert_same(answer(runner), model.greedy)
        assert_same(answer(runner, SAMPLED), model.sampled)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_trap_3_memory_that_was_never_written_holds_nan_and_leaks_none(
    share: float, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_blocks(monkeypatch)
    with open_partly(model.path, share, streamed=0.4, context_length=512) as runner:
        assert_same(answer(runner), model.greedy)
        prompt = token_ids(300)
        runner.reset()
        actual = runner.prefill(prompt)
    with open_cuda(model.path, context_length=512) as whole:
        assert np.array_equal(actual, whole.prefill(prompt))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("streamed", [0.0, 0.5, 1.0])
def test_ex07_threads_and_who_computes_what_is_missing(threads: int, streamed: float, model: Model) -> None:
    with open_partly(model.path, 0.2, streamed=streamed, threads=threads, context_length=512) as runner:
        assert_same(answer(runner), model.greedy)


@pytest.mark.parametrize("prefetching", [None, Prefetching(2, 3)])
def test_ex07_random_residency_at_every_step_and_a_thousand_swaps(
    prefetching: Prefetching | None, model: Model
) -> None:
    policy = RandomResidency(seed=3)
    with open_partly(
        model.path, 0.3, streamed=0.3, policy=policy, context_length=512, prefetching=prefetching
    ) as runner:
        assert_same(answer(runner), model.greedy)
        assert_same(answer(runner, SAMPLED), model.sampled)
        cache = runner.expert_cache
        assert cache is not None
        assert cache.counters.evictions.sum() > 1000
        assert_same(answer(runner), model.greedy)


@pytest.mark.alone
def test_trap_23_twenty_requests_and_memory_stays(half: OneSequence, model: Model) -> None:
    answer(half, count=20)
    taken = None
    for _ in range(21):
        assert_same(answer(half), model.greedy)
        calls.synchronize()
        free = calls.free_memory()[0]
        taken = free if taken is None else taken
        assert free == taken


@pytest.mark.parametrize("prefetching", [Prefetching(1, 1), Prefetching(1, 4), Prefetching(3, 8)])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_prefetching_changes_no_bit(share: float, prefetching: Prefetching, model: Model) -> None:
    with open_partly(
        model.path, share, streamed=0.5, context_length=512, cache_size=SIZE, prefetching=prefetching
    ) as runner:
        assert_same(answer(runner), model.greedy)
        assert_same(answer(runner, SAMPLED), model.sampled)
        statistics = runner.gpu_experts
        assert statistics is not None
        assert statistics.prefetch is not None
        chance = runner.spec.num_experts_per_tok / runner.spec.num_experts
        assert statistics.prefetch.recall > 1.5 * chance
        assert sum(statistics.prefetch.fetched) >= sum(statistics.prefetch.used) > 0
        for count in (2, 8, 9, 3):
            test_a_sequence_among_others(runner, count)
            assert_same(answer(runner), model.greedy)


@pytest.mark.parametrize("count", [2, 8, 9, 17, 40])
def test_a_sequence_among_others(half: OneSequence, count: int) -> None:
    prompts = [token_ids(10 + i)[: 5 + i % 7] for i in range(count)]
    alone = []
    for prompt in prompts:
        half.reset()
        half.prefill(prompt)
        alone.append(half.decode(7))
    half.reset()
    sequences = [half.new_sequence() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        half.runner.extend(sequence, prompt)
    together = step_rows(half, sequences, [7] * count)
    for sequence in sequences:
        half.release(sequence)
    assert np.array_equal(together, np.stack(alone))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_trap_4_all_hot_all_cold_and_the_same_experts_for_all_rows(share: float, path: Path) -> None:
    """Batches that leave nothing to one of the places, and rows that all choose alike."""
    with open_partly(path, share) as runner, open_cuda(path) as whole:
        for count in (1, 2, 4, 5, 8, 9, 16, 24, 64, 128):
            for ids in (token_ids(count), [7] * count):
                runner.reset()
                whole.reset()
                assert np.array_equal(runner.prefill(ids), whole.prefill(ids))


@pytest.mark.parametrize("count", [65, 168, 300, 450])
def test_long_prompts(half: OneSequence, path: Path, count: int) -> None:
    ids = token_ids(count)
    with open_cuda(path, context_length=512) as whole:
        expected = whole.prefill(ids)
    half.reset()
    assert np.array_equal(half.prefill(ids), expected)


def test_ex05_a_prompt_does_not_flush_what_decoding_uses(half: OneSequence) -> None:
    answer(half, count=50)
    cache = half.expert_cache
    assert cache is not None
    before = cache.counters.copies.sum()
    half.reset()
    half.prefill(token_ids(400))
    assert cache.counters.copies.sum() - before < 20  # what decoding had asked for


def test_fl01_a_file_that_shrinks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copy(demo_model_path(), tmp_path / "demo.gguf"))
    with open_partly(path, 0.0) as runner:
        answer(runner, count=3)
        runner.reset()
        runner.prefill(PROMPT)
        # Later than a request looks whether it is the file that was opened.
        monkeypatch.setattr(GGUFFile, "check_unchanged", lambda self: os.truncate(path, 2**20))
        with pytest.raises(ModelChangedError, match=r"demo.gguf"):
            runner.decode(3)
        assert runner.position == 0


@pytest.mark.alone
def test_trap_24_a_closed_runner_gives_its_memory_back() -> None:
    free = []
    for _ in range(3):
        with open_partly(demo_model_path(), 0.5) as runner:
            answer(runner, count=5)
        free.append(calls.free_memory()[0])
    assert free[1] == free[2]
