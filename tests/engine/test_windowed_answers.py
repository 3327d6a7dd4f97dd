"""Answers of models with windows: in a long context, which keeps windows alone, those of a short one."""

from dataclasses import replace
from pathlib import Path

import pytest
from engine_clients import alone, engine_of

from bench.runners import open_cpu_runner
from builders import Dims, make_model, write_model
from coldstream import LLM, SamplingParams
from coldstream.kvcache import CacheSize
from coldstream.kvcache.windows import blocks_of_pool
from dflash_cases import for_target, random_tensors, spec_of, write_converted
from hash_runner import opened_with

DIMS = Dims(experts=8, experts_used=2, context=32_768)
SHORT, LONG = 1400, 32_768  # tokens; in the short one all positions are kept
WORDS = "def f(x):\n    return x + 1\n"
PROMPTS = [WORDS * 20, WORDS * 20 + "the other", WORDS * 20 + "the others", WORDS * 31]
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module", params=["gpt-oss", "gemma4", "laguna"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return write_model(path, make_model(request.param, dims=DIMS))[0]


@pytest.fixture(scope="module")
def answers(path: Path) -> list[list[int]]:
    with LLM(str(path), device="cpu", threads=1, ctx_size=SHORT) as llm:
        assert not llm.opened.runner.cache_size.num_window_blocks
        return tokens_of(llm)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, SAMPLED)]


@pytest.mark.parametrize("settings", [{}, {"spec_type": "ngram", "threads": 2}], ids=str)
def test_a_long_context_has_the_tokens_of_a_short_one(
    path: Path, answers: list[list[int]], settings: dict[str, object]
) -> None:
    """Prompts have parts in common, and are asked again, so that they begin with what was kept."""
    with LLM(str(path), device="cpu", ctx_size=LONG, **settings) as llm:
        assert llm.opened.runner.cache_size.num_window_blocks
        assert tokens_of(llm) == answers
        outputs = llm.generate(PROMPTS, SAMPLED)
        assert [list(output.outputs[0].token_ids) for output in outputs] == answers
        assert sum(output.statistics.reused_tokens for output in outputs) > 300


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("vram", ["auto", "700M"])
def test_a_real_gpu(
    path: Path,
    answers: list[list[int]],
    tmp_path: Path,
    draft: bool,
    vram: str,
    request: pytest.FixtureRequest,
) -> None:
    """With drafts of a model whose fused steps run ahead of the host, where all experts are on the device."""
    settings = {}
    if draft:
        target = "Laguna" if request.node.callspec.params["path"] == "laguna" else "first"
        values = for_target(target, DIMS)
        folder = write_converted(tmp_path / "drafter", values, random_tensors(spec_of(values)))
        settings = {"model_draft": str(folder), "tree_budget": 4}
    with LLM(str(path), device="cuda", ctx_size=LONG, vram=vram, **settings) as llm:
        assert llm.opened.runner.cache_size.num_window_blocks
        assert tokens_of(llm) == answers
        for prompt, answer in zip(PROMPTS, answers, strict=True):  # alone, with steps launched ahead or fused
            (output,) = llm.generate(prompt, SAMPLED)
            assert list(output.outputs[0].token_ids) == answer


@pytest.mark.parametrize(
    ("words", "at_once"), [("", range(7, 10)), (WORDS * 10, range(4, 10)), (WORDS * 20, range(2, 6))]
)
def test_texts_share_the_blocks_of_two_windows(tmp_path: Path, words: str, at_once: range) -> None:
    """The shorter they are, the more run at once. Of those that grow some give way, and each has the tokens
    that it has alone.
    """
    model = make_model("gemma4", dims=DIMS)
    model.metadata["gemma4.attention.sliding_window"] = 300
    (path,) = write_model(tmp_path / "model.gguf", model)
    size = CacheSize(60, 16, num_window_blocks=blocks_of_pool(300, 2, 256))
    runner = open_cpu_runner(path, threads=2, context_length=2048, cache_size=size)
    params, running = replace(SAMPLED, max_tokens=24), [0]
    with LLM.from_opened(opened_with(runner, 2048)) as llm:
        prompts = [llm.opened.tokenizer.encode(f"{index} {words}def") for index in range(12)]
        expected = [alone(llm, prompt, params) for prompt in prompts]
        llm.forget()
        with engine_of(llm.opened) as client:
            requests = [client.add(prompt, params) for prompt in prompts]
            while not client.engine.is_idle:
                client.step()
                running.append(client.engine.statistics().running)
            assert [client.answers(request) for request in requests] == expected
            preemptions = client.engine.statistics().preemptions
    assert max(running) in at_once
    assert (preemptions > 0) == (words == WORDS * 10)
