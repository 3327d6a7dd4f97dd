"""NF01: a NaN in a state, in an expert or in the logits fails the request that it reaches, and only that one.

Whatever comes next is answered like by a model that was just opened. Requests are repeated, so that a GPU
computes them plainly and from captured graphs; a CPU always computes from one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import open_cuda, open_partly
from one_sequence import open_cpu
from runner_cases import MIX, token_ids

from builders import Dims, write_gguf
from coldstream import LLM, SamplingParams
from coldstream.errors import GenerationFault
from coldstream.experts.prefetch import Prefetching
from coldstream.models.cpu.runner import CpuRunner
from device_arrays import array_of, change, tensor_of
from hash_runner import opened_with

CONTEXT = CpuRunner.chunk_size + 128
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5),
    "greedy-penalised": replace(GREEDY, repetition_penalty=1.3),
    "processed": replace(SAMPLED, logits_processors=(lambda context, logits: logits,)),
}
FAULT = "not finite; .* next request starts from an empty state; if it fails too, download"
PROMPT = token_ids(21)
OTHER = token_ids(33)
LONG = token_ids(CONTEXT - 20)

Open = Callable[[Path], LLM]


def on_cpu(path: Path) -> LLM:
    return LLM(path, device="cpu", threads=2, ctx_size=CONTEXT)


def on_cpu_from_disk(path: Path) -> LLM:
    llm = LLM(path, device="cpu", threads=2, ctx_size=CONTEXT, ram="16M")
    assert llm.opened.runner.disk is not None
    return llm


def on_gpu(path: Path) -> LLM:
    return LLM.from_opened(opened_with(open_cuda(path, context_length=CONTEXT).runner, CONTEXT))


def on_gpu_in_part(path: Path) -> LLM:
    runner = open_partly(path, 0.5, streamed=0.5, context_length=CONTEXT)
    return LLM.from_opened(opened_with(runner.runner, CONTEXT))


def on_gpu_prefetching(path: Path) -> LLM:
    runner = open_partly(path, 0.25, context_length=CONTEXT, prefetching=Prefetching(1, 8))
    return LLM.from_opened(opened_with(runner.runner, CONTEXT))


PLACES = [
    pytest.param(on_cpu, id="cpu"),
    pytest.param(on_cpu_from_disk, id="cpu-disk"),
    pytest.param(on_gpu, id="gpu", marks=pytest.mark.gpu),
    pytest.param(on_gpu_in_part, id="gpu-in-part", marks=pytest.mark.gpu),
    pytest.param(on_gpu_prefetching, id="gpu-prefetching", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts most of which a short prompt does not use."""
    (path,) = write_gguf(tmp_path_factory.mktemp("models") / "moe.gguf", types=MIX, dims=Dims(experts=32))
    return path


@pytest.fixture(scope="module", params=PLACES)
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with request.param(path) as llm:
        yield llm


Answers = Callable[..., tuple[int, ...]]


@pytest.fixture(scope="module")
def fresh(path: Path) -> Answers:
    """Answers of a newly opened model on the CPU, whose tokens are the same everywhere."""
    known: dict[Any, tuple[int, ...]] = {}

    def answer(prompt: Sequence[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
        key = (tuple(prompt), params)
        if key not in known:
            with on_cpu(path) as llm:
                known[key] = tokens(llm, prompt, params)
        return known[key]

    return answer


def tokens(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return llm.generate([prompt], params)[0].token_ids


def states(llm: LLM) -> list[tuple[str, Any]]:
    """Every array of the state with its name."""
    layers = llm.opened.runner._sequences.tensors.layers
    return [(name, array) for layer in layers for name, array in vars(layer).items()]


SCALE_BYTES = 16


def poison(llm: LLM, kind: str, *, everywhere: bool) -> None:
    """NaN in the tensors of that kind: in one element of each slot that the next token reads, or in all."""

    def spoil(values: np.ndarray) -> None:
        if kind in "kv":  # the scale of a row is behind its codes
            values = values[..., -SCALE_BYTES : 4 - SCALE_BYTES].view(np.float32)
        if everywhere:
            values[...] = np.nan
        else:
            values[(slice(None), *[0] * (values.ndim - 1))] = np.nan

    for name, array in states(llm):
        if name == kind:
            change(array, spoil)


def assert_like_fresh(llm: LLM, fresh: Answers, params: SamplingParams = GREEDY) -> None:
    """The prompt before, one that extends what was there, and another one."""
    answer = fresh(PROMPT, params)
    for prompt in ([*PROMPT, *answer[:3], 5], PROMPT, [*PROMPT, *answer, 5, 6], OTHER):
        assert tokens(llm, prompt, params) == fresh(prompt, params)


KINDS = ("conv_state", "state", "k", "v")


@pytest.mark.sharded(9)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_state_between_two_tokens(llm: LLM, fresh: Answers, kind: str, everywhere: bool) -> None:
    """A step that was launched ahead of the host still gives its token, as it has read the state before."""
    num_ahead = int(llm.opened.runner.takes_chosen)
    for _ in range(2):
        stream = llm.stream(PROMPT, GREEDY)
        given = [next(stream).token_ids[0] for _ in range(3)]
        poison(llm, kind, everywhere=everywhere)
        given += [next(stream).token_ids[0] for _ in range(num_ahead)]
        with pytest.raises(GenerationFault, match=FAULT):
            next(stream)
        assert tuple(given) == fresh(PROMPT)[: 3 + num_ahead]
        assert_like_fresh(llm, fresh)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_state_before_a_prompt_extends_it(llm: LLM, fresh: Answers, kind: str) -> None:
    extended = [*PROMPT, *fresh(PROMPT), *OTHER]
    for _ in range(2):
        assert tokens(llm, PROMPT) == fresh(PROMPT)
        poison(llm, kind, everywhere=True)
        with pytest.raises(GenerationFault, match=FAULT):
            tokens(llm, extended)
        answer = llm.generate([extended], GREEDY)[0]
        assert answer.token_ids == fresh(extended)
        assert answer.statistics.reused_tokens == 0
        assert_like_fresh(llm, fresh)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_state_between_two_steps_of_a_prompt(
    llm: LLM, fresh: Answers, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A GPU would take the prompt in one step.
    monkeypatch.setattr(llm.opened.runner, "chunk_size", CpuRunner.chunk_size)

    def poisoning(done: int, total: int) -> None:
        if done < total:
            poison(llm, kind, everywhere=True)

    with pytest.raises(GenerationFault, match=FAULT):
        list(llm.stream(LONG, GREEDY, progress=poisoning))
    assert tokens(llm, [*LONG, 5]) == fresh([*LONG, 5])
    assert_like_fresh(llm, fresh)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_nan_in_logits_however_a_token_is_chosen(
    llm: LLM, fresh: Answers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps are launched ahead of their token, one more has begun; its logits are never looked at."""
    params = SAMPLINGS[name]
    runner: Any = llm.opened.runner
    num_ahead = int(runner.takes_chosen and not params.logits_processors)
    method = "_logits_of" if isinstance(runner, CpuRunner) else "_on_device"
    compute, calls = getattr(runner, method), []

    def spoil(values: np.ndarray) -> None:
        values[:, 7] = np.nan

    def poisoned(rows: np.ndarray) -> Any:
        logits = compute(rows)
        calls.append(rows)
        if len(calls) == 4:
            logits = logits.copy() if isinstance(logits, np.ndarray) else array_of(tensor_of(logits))
            change(logits, spoil)
        return logits

    for _ in range(2):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(runner, method, poisoned)
            with pytest.raises(GenerationFault, match=FAULT):
                tokens(llm, PROMPT, params)
        assert len(calls) == 4 + num_ahead
        assert_like_fresh(llm, fresh, params)


def test_nan_in_logits_of_all_tokens(llm: LLM, fresh: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.logits(PROMPT)
    poisoned_at = runner_compute_then_poison(llm, monkeypatch)
    with pytest.raises(GenerationFault, match=rf"at position {poisoned_at} are {FAULT}"):
        llm.logits(PROMPT)
    monkeypatch.undo()
    assert np.array_equal(llm.logits(PROMPT), expected)
    assert_like_fresh(llm, fresh)


def runner_compute_then_poison(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes the logits after token 2 of the next prompt NaN; the position that they are for."""
    runner: Any = llm.opened.runner
    compute = runner._logits_of

    def poisoned(rows: np.ndarray) -> Any:
        logits = np.array(compute(rows))
        if rows[0] == 0:
            logits[2, 5:9] = np.inf
        return logits

    monkeypatch.setattr(runner, "_logits_of", poisoned)
    return 3


@pytest.fixture(scope="module")
def damaged(path: Path, fresh: Answers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The model with a NaN for a scale in one expert, and how many tokens of the answer to PROMPT come before
    that expert is used.
    """
    ids = [*PROMPT, *fresh(PROMPT)]
    with open_cpu(path, threads=2, context_length=CONTEXT) as runner:
        runner.prefill(ids)
        chosen = runner.topk_ids(len(ids))
        num_layers, num_experts = runner.spec.num_layers, runner.spec.num_experts
        tensors = runner.file.tensors
    first_use = {
        (layer, expert): int(np.argmax((chosen[:, layer] == expert).any(axis=-1)))
        for layer in range(num_layers - 1)
        for expert in range(num_experts)
        if (chosen[:, layer] == expert).any()
    }
    (layer, expert), use = max(first_use.items(), key=lambda item: item[1] if item[1] < len(ids) - 2 else -1)
    assert use > len(PROMPT) + 1, "after some tokens of the answer"
    info = tensors[f"blk.{layer}.ffn_down_exps.weight"]
    data = bytearray(path.read_bytes())
    block = info.offset + expert * (info.num_bytes // num_experts)
    data[block + 208 : block + 210] = np.float16(np.nan).tobytes()  # of the 210 bytes of a block of Q6_K
    damaged = tmp_path_factory.mktemp("models") / "damaged.gguf"
    damaged.write_bytes(data)
    return damaged, use - len(PROMPT) + 1


@pytest.mark.parametrize("open_llm", PLACES)
def test_nan_in_an_expert_that_some_tokens_use(
    open_llm: Open, damaged: tuple[Path, int], fresh: Answers
) -> None:
    path, num_sound = damaged
    answer = fresh(PROMPT)
    sound = [*PROMPT, *answer[: num_sound - 1]]
    one, two = replace(GREEDY, max_tokens=1), replace(GREEDY, max_tokens=2)
    with open_llm(path) as llm:
        for _ in range(3):
            stream = llm.stream(PROMPT, GREEDY)
            assert tuple(next(stream).token_ids[0] for _ in range(num_sound)) == answer[:num_sound]
            with pytest.raises(GenerationFault, match=FAULT):
                next(stream)
            assert tokens(llm, PROMPT, two) == answer[:2]
            with pytest.raises(GenerationFault, match=FAULT):
                tokens(llm, [*sound, answer[num_sound - 1]])  # extends what is there
            assert tokens(llm, sound, one) == (answer[num_sound - 1],)
            with pytest.raises(GenerationFault, match=rf"at position {len(sound) + 1} are {FAULT}"):
                llm.logits([*PROMPT, *answer])
            assert tokens(llm, PROMPT[:7], one) == fresh(PROMPT[:7], one)


@pytest.mark.parametrize("open_llm", PLACES)
def test_nan_in_the_head(open_llm: Open, path: Path, tmp_path: Path) -> None:
    """Nothing can be answered, and every request says why."""
    with on_cpu(path) as llm:
        info = llm.opened.runner.file.tensors["output.weight"]
    data = bytearray(path.read_bytes())
    data[info.offset : info.offset + 2] = np.float16(np.nan).tobytes()  # the scale of a block of Q8_0
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    with open_llm(damaged) as llm:
        for prompt in (PROMPT, PROMPT, [*PROMPT, 5], OTHER):
            for params in SAMPLINGS.values():
                # A step may end before the last token, where a checkpoint is left.
                at = f"({len(prompt) - 1}|{len(prompt)})"
                with pytest.raises(GenerationFault, match=rf"1 of 320 .* position {at} are {FAULT}"):
                    tokens(llm, prompt, params)
            with pytest.raises(GenerationFault, match=rf"1 of 320 .* position 1 are {FAULT}"):
                llm.logits(prompt)


def test_a_chat_goes_on_after_a_fault(path: Path) -> None:
    """From the beginning: else it would extend the state that was found damaged."""
    messages = [{"role": "user", "content": "def"}]
    with on_cpu(path) as llm:
        (the,), end = llm.opened.tokenizer.encode(" the"), llm.opened.tokenizer.special_ids["<|im_end|>"]

        def say_the(context: Sequence[int], logits: np.ndarray) -> np.ndarray:
            wanted = end if context[-1] == the else the
            return np.where(np.arange(len(logits)) == wanted, np.float32(1e4), logits)

        params = SamplingParams(temperature=0, logits_processors=(say_the,))
        assert llm.chat(messages, params)[0].text == " the"
        messages += [{"role": "assistant", "content": " the"}, {"role": "user", "content": "and"}]
        poison(llm, "state", everywhere=False)
        with pytest.raises(GenerationFault, match=FAULT):
            llm.chat(messages, params)
        output = llm.chat(messages, params)[0]
        assert (output.text, output.statistics.reused_tokens) == (" the", 0)
