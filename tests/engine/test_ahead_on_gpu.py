"""Answers on a GPU, whose steps are launched before their token is known: those of the CPU, and so is what
the next prompt finds of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from test_lists_on_gpu import CONTEXT, KINDS, SEEDED, SIZE, on_cpu, on_gpu, path

from bench.runners import open_model_file, partial_plan
from coldstream.assets import demo_model_path
from coldstream.decoding import Grammar, Thought
from coldstream.engine import LLM, Piece, SamplingParams, engine
from coldstream.engine.constraint import AnswerConstraint
from coldstream.engine.model_steps import LaunchedStep, launch_ahead
from coldstream.experts.miss_shares import STEPS_OF_AN_UPDATE, MissShares, Seen
from coldstream.experts.partial_experts import PartialExperts
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.sample.settings import Bitmask
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.runner import ModelRunner
from coldstream.placement.controls import Controls, Moves
from hash_runner import opened_with
from host_device import HostDevice
from host_gpu import gpu_on
from random_residency import RandomResidency

__all__ = ["path"]

GREEDY = replace(SEEDED, temperature=0.0, max_tokens=6)
STOPPING = [
    replace(SEEDED, max_tokens=30, temperature=1.5, top_k=0, stop_token_ids=range(0, 300, 3)),
    replace(SEEDED, max_tokens=5, temperature=1.5, top_k=0, min_tokens=2, stop_token_ids=range(0, 300, 3)),
    replace(SEEDED, max_tokens=5, logit_bias=dict.fromkeys(range(0, 300, 2), 3.0)),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, frequency_penalty=2.0, repeat_last_n=1),
    replace(GREEDY, presence_penalty=2.0, repeat_last_n=None),
    replace(SEEDED, max_tokens=5, logprobs=3, frequency_penalty=0.5),
]
# The choice of a token needs those before it: masks come from the host, while the step is under way.
CONSTRAINED = [
    SamplingParams(temperature=1.5, top_k=0, seed=5, max_tokens=6, grammar=Grammar("regex", "[a-h]{2,4}")),
    SamplingParams(temperature=0, seed=5, max_tokens=5, grammar=Grammar("regex", "(ab|b){3}"), logprobs=2),
    replace(SEEDED, max_tokens=9, thought=Thought(is_open=True, budget=2)),
]


@contextmanager
def on_partial_gpu(path: Path) -> Iterator[LLM]:
    """Experts come and go, from one step to the next; some come ahead of their router."""
    file, spec = open_model_file(path)
    plan = partial_plan(
        file, spec, 2, context_length=CONTEXT, chunk_size=80, ring_bytes=2**22, threads=1, streamed=0.5,
        prefetching=Prefetching(1, 2),
    )  # fmt: skip
    runner = CudaRunner.load(file, spec, plan, policy=RandomResidency(3), cache_size=SIZE)
    with LLM.from_opened(opened_with(runner, CONTEXT)) as llm:
        yield llm


WAYS = {"all experts": on_gpu, "some experts": on_partial_gpu}


@pytest.fixture(scope="module", params=WAYS)
def models(
    request: pytest.FixtureRequest, path: Path, compiled_for_the_host: HostDevice
) -> Iterator[tuple[LLM, LLM]]:
    way = WAYS[request.param]
    with gpu_on(compiled_for_the_host), way(path) as gpu, on_cpu(path) as cpu:
        yield gpu, cpu


def reported(piece: Piece) -> tuple[object, ...]:
    reused = piece.statistics.reused_tokens if piece.statistics else None
    return piece.text, piece.token_ids, piece.finish_reason, piece.stop_reason, reused


def check_conversation(gpu: LLM, cpu: LLM, params: SamplingParams) -> None:
    """Each prompt extends what the sequence holds, which is all but the last token."""
    gpu.forget()
    cpu.forget()
    prompt, held = [1, 2, 3], 0
    for turn in range(3):
        found = [reported(piece) for piece in gpu.stream(prompt, params)]
        assert found == [reported(piece) for piece in cpu.stream(prompt, params)], turn
        assert found[-1][-1] == held, turn
        prompt += [token_id for piece in found for token_id in piece[1]]
        held, prompt = len(prompt) - 1, [*prompt, 7 + turn]


ALL_KINDS = [each for each in KINDS if each.n == 1] + STOPPING + CONSTRAINED


@pytest.mark.sharded
@pytest.mark.parametrize("params", ALL_KINDS)
def test_a_conversation_is_that_of_the_cpu(models: tuple[LLM, LLM], params: SamplingParams) -> None:
    check_conversation(*models, params)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_trap_26_conversations_on_a_gpu_are_those_of_the_cpu(path: Path, way: str) -> None:
    """With some long answers, whose steps follow each other without pause."""
    longer = [replace(params, max_tokens=40) for params in (GREEDY, SEEDED, STOPPING[0])]
    for model in (path, demo_model_path()):
        with WAYS[way](model) as gpu, on_cpu(model) as cpu:
            for params in [*ALL_KINDS, *longer] if model == path else [*ALL_KINDS, longer[0]]:
                check_conversation(gpu, cpu, replace(params, max_tokens=min(params.max_tokens, 40)))


@pytest.mark.sharded(of="models on a GPU")
def test_a_prompt_whose_experts_are_streamed_ends_before_a_step_ahead_begins(models: tuple[LLM, LLM]) -> None:
    gpu, cpu = models
    prompt = [number % 11 for number in range(70)]
    found, expected = (llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for llm in (gpu, cpu))
    assert found == expected


@pytest.mark.sharded(of="models on a GPU")
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


def test_a_runner_says_which_steps_have_ended(
    path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run while the one before is looked at; a row that an end token leaves out is reported."""
    reported: list[object] = []
    ended = PartialExperts.ended

    def noting(self: PartialExperts, num_running: int = 0) -> None:
        if self._in_flight:
            reported.append((len(self._in_flight), num_running))
        ended(self, num_running)

    with gpu_on(compiled_for_the_host), on_partial_gpu(path) as gpu:
        params = replace(GREEDY, max_tokens=4)
        gpu.generate([[3, 1]], params)
        monkeypatch.setattr(PartialExperts, "ended", noting)
        monkeypatch.setattr(PartialExperts, "left_out", lambda self: reported.append("left out"))
        (answer,) = gpu.generate([[3, 1]], params)[0].outputs
        assert reported == [(2, 1), (2, 1), (2, 1), (1, 0)]
        reported.clear()
        gpu.generate([[3, 1]], replace(params, ignore_eos=False, stop_token_ids=answer.token_ids[:1]))
        assert reported == [(2, 1), "left out", (1, 0)], "with the step that was left"


def test_shares_learn_while_a_step_runs_and_none_is_to_be_launched(
    path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a launch, so that the GPU has two steps, or at the end of an answer, when it has none."""
    learnt: list[int] = []
    learn = MissShares.learn

    def noting(self: MissShares, seen: Seen) -> bool:
        learnt.append(len(partial._in_flight))
        return learn(self, seen)

    monkeypatch.setattr(MissShares, "learn", noting)
    with gpu_on(compiled_for_the_host), on_partial_gpu(path) as gpu:
        partial = gpu.opened.runner._partial
        gpu.opened.runner.control(Controls(Moves.ALWAYS, Moves.ALWAYS))
        gpu.generate([[3, 1]], replace(GREEDY, max_tokens=4 * STEPS_OF_AN_UPDATE))
    assert len(learnt) >= 3
    assert set(learnt) <= {0, 2}


@pytest.mark.sharded(of="models on a GPU")
def test_steps_are_launched_ahead_unless_the_host_chooses(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, _ = models
    assert gpu.opened.runner.takes_chosen
    launched: list[LaunchedStep] = []

    def noting(runner: ModelRunner, before: LaunchedStep) -> LaunchedStep:
        launched.append(launch_ahead(runner, before))
        return launched[-1]

    monkeypatch.setattr(engine, "launch_ahead", noting)
    list(gpu.stream([3, 1], GREEDY))
    assert len(launched) == GREEDY.max_tokens - 1
    list(gpu.stream([3, 1], replace(GREEDY, logprobs=0)))
    assert len(launched) == 2 * (GREEDY.max_tokens - 1)
    list(gpu.stream([3, 1], replace(GREEDY, logits_processors=[lambda _, logits: logits])))
    assert len(launched) == 2 * (GREEDY.max_tokens - 1)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.parametrize("params", CONSTRAINED)
def test_a_step_whose_token_a_grammar_restricts_is_launched_before_its_mask_is_there(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    gpu, _ = models
    done: list[str] = []
    allowed = AnswerConstraint.allowed

    def noting(runner: ModelRunner, before: LaunchedStep) -> LaunchedStep:
        done.append("launched")
        return launch_ahead(runner, before)

    def noting_mask(self: AnswerConstraint, context: Sequence[int]) -> Bitmask | None:
        done.append(f"mask of {len(context)}")
        return allowed(self, context)

    monkeypatch.setattr(engine, "launch_ahead", noting)
    monkeypatch.setattr(AnswerConstraint, "allowed", noting_mask)
    num_tokens = sum(len(piece.token_ids) for piece in gpu.stream([3, 1], params))
    expected = ["mask of 2"]
    for length in range(3, 2 + num_tokens):
        expected += ["launched", f"mask of {length}"]
    assert done[: len(expected)] == expected
    assert done[len(expected) :] in ([], ["launched"]), "that of a row behind the last token"


@pytest.mark.sharded(of="models on a GPU")
def test_a_list_leaves_live_what_a_step_ahead_has_computed_of_its_last_answer(
    models: tuple[LLM, LLM],
) -> None:
    """A stop string ends it, which the host sees once the step after it is launched."""
    gpu, cpu = models
    text = gpu.generate([[4, 5]], GREEDY)[0].outputs[0].text
    params = [replace(GREEDY, max_tokens=1), replace(GREEDY, stop=[text[2:4]])]
    last = gpu.generate([[1], [4, 5]], params)[1].outputs[0]
    assert last.finish_reason == "stop"
    longer = [4, 5, *last.token_ids, 6]
    found, expected = (llm.generate([longer], GREEDY)[0] for llm in (gpu, cpu))
    assert found.statistics.reused_tokens >= len(longer) - 2
    assert found.token_ids == expected.token_ids
