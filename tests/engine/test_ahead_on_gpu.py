"""Answers on a GPU, whose steps are launched before their token is known: those of the CPU, and so is what
the next prompt finds of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from test_lists_on_gpu import KINDS, SEEDED, on_cpu, on_gpu, path

from coldstream.assets import demo_model_path
from coldstream.engine import LLM, Piece, SamplingParams
from coldstream.models.runner import ModelRunner
from host_device import HostDevice
from host_gpu import gpu_on

__all__ = ["path"]

GREEDY = replace(SEEDED, temperature=0.0, max_tokens=6)
STOPPING = [
    replace(SEEDED, max_tokens=30, temperature=1.5, top_k=0, stop_token_ids=range(0, 300, 3)),
    replace(SEEDED, max_tokens=5, temperature=1.5, top_k=0, min_tokens=2, stop_token_ids=range(0, 300, 3)),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, frequency_penalty=2.0, repeat_last_n=1),
    replace(GREEDY, presence_penalty=2.0, repeat_last_n=None),
]


@pytest.fixture(scope="module")
def models(path: Path, compiled_for_the_host: HostDevice) -> Iterator[tuple[LLM, LLM]]:
    with gpu_on(compiled_for_the_host), on_gpu(path) as gpu, on_cpu(path) as cpu:
        yield gpu, cpu


def told(piece: Piece) -> tuple[object, ...]:
    reused = piece.statistics.reused_tokens if piece.statistics else None
    return piece.text, piece.token_ids, piece.finish_reason, piece.stop_reason, reused


def check_conversation(gpu: LLM, cpu: LLM, params: SamplingParams) -> None:
    """Each prompt extends what the sequence holds, which is all but the last token."""
    gpu.forget()
    cpu.forget()
    prompt, held = [1, 2, 3], 0
    for turn in range(3):
        found = [told(piece) for piece in gpu.stream(prompt, params)]
        assert found == [told(piece) for piece in cpu.stream(prompt, params)], turn
        assert found[-1][-1] == held, turn
        prompt += [token_id for piece in found for token_id in piece[1]]
        held, prompt = len(prompt) - 1, [*prompt, 7 + turn]


ALL_KINDS = [each for each in KINDS if each.n == 1] + STOPPING


@pytest.mark.parametrize("params", ALL_KINDS)
def test_a_conversation_is_that_of_the_cpu(models: tuple[LLM, LLM], params: SamplingParams) -> None:
    check_conversation(*models, params)


@pytest.mark.gpu
def test_trap_26_conversations_on_a_gpu_are_those_of_the_cpu(path: Path) -> None:
    """With long answers too, whose steps follow each other without pause."""
    longer = [replace(params, max_tokens=40) for params in ALL_KINDS]
    for model in (path, demo_model_path()):
        with on_gpu(model) as gpu, on_cpu(model) as cpu:
            for params in [*ALL_KINDS, *longer] if model == path else [*ALL_KINDS, longer[0]]:
                check_conversation(gpu, cpu, replace(params, max_tokens=min(params.max_tokens, 40)))


def test_an_answer_that_is_left_early_can_be_continued(models: tuple[LLM, LLM]) -> None:
    """By all tokens that were given out, or by others."""
    gpu, cpu = models
    params = replace(GREEDY, max_tokens=8)
    for num_taken in (1, 3):
        with gpu.stream([4, 5], params) as stream:
            taken = [token_id for _ in range(num_taken) for token_id in next(stream).token_ids]
        for prompt in ([4, 5, *taken, 6], [4, 5, *taken[:-1], 8, 9]):
            found, expected = (list(llm.stream(prompt, params)) for llm in (gpu, cpu))
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_steps_are_launched_ahead_unless_the_host_chooses(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, _ = models
    steps: list[bool] = []
    step = ModelRunner.step

    def noting(self: ModelRunner, *batch: object) -> object:
        steps.append(True)
        return step(self, *batch)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "step", noting)
    list(gpu.stream([3, 1], GREEDY))
    assert len(steps) == GREEDY.max_tokens - 1
    list(gpu.stream([3, 1], replace(GREEDY, logprobs=0)))
    assert len(steps) == GREEDY.max_tokens - 1
