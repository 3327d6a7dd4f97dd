"""Requests for which logits are brought from the GPU: the answers of the CPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from coldstream.assets import demo_model_path
from coldstream.engine import LLM, SamplingParams

PROMPTS = ["import os\n", "def read_lines(path):"]
SEEDED = SamplingParams(seed=5, max_tokens=24)


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[LLM]:
    with LLM(demo_model_path(), device="cuda", ctx_size=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[LLM]:
    with LLM(demo_model_path(), device="cpu", ctx_size=128) as llm:
        yield llm


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [
        SEEDED,
        replace(SEEDED, repetition_penalty=1.3, min_tokens=8, n=3),
        replace(SEEDED, min_tokens=24, ignore_eos=True, stop_token_ids=range(300)),
        replace(SEEDED, temperature=0.0, min_tokens=5, stop_token_ids=range(0, 2048, 2)),
        replace(SEEDED, temperature=0.0, logprobs=3),
        replace(SEEDED, temperature=1.5, top_k=-1, logprobs=0, frequency_penalty=0.4, n=2),
    ],
    ids=["plain", "end tokens", "stop tokens", "many stop tokens", "greedy", "logprobs"],
)
def test_answers_and_log_probabilities_are_those_of_the_cpu(
    on_gpu: LLM, on_cpu: LLM, params: SamplingParams
) -> None:
    for found, expected in zip(
        on_gpu.generate(PROMPTS, params), on_cpu.generate(PROMPTS, params), strict=True
    ):
        for answer, wanted in zip(found.outputs, expected.outputs, strict=True):
            assert replace(answer, statistics=wanted.statistics) == wanted


@pytest.mark.gpu
def test_log_probabilities_change_no_token_of_the_gpu(on_gpu: LLM) -> None:
    plain = on_gpu.generate(PROMPTS, SEEDED)
    with_them = on_gpu.generate(PROMPTS, replace(SEEDED, logprobs=5))
    assert [output.token_ids for output in with_them] == [output.token_ids for output in plain]
