"""Models of new families through the whole program: budgets, disk, lists, kept prefixes, drafts, a GPU."""

from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import check_chains, open_partly
from one_sequence import open_cpu

from builders import Dims, make_model, write_gguf, write_model
from coldstream import LLM, SamplingParams
from ram_budgets import least_ram

FAMILIES = ("laguna", "gpt-oss", "gemma4")
TYPES = {"*_exps.weight": "Q4_K", "*.ffn_down_exps.weight": "Q6_K"}
PROMPTS = ["def f(x):\n    return", "the other", "def f(x):\n    return x + 1\n\nthe"]
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return write_gguf(path, request.param, types=TYPES, dims=Dims(experts=32, experts_used=4))[0]


@pytest.fixture(scope="module")
def answers(path: Path) -> list[list[int]]:
    """Of each prompt on its own, with everything in memory and no drafts."""
    return [tokens_of(LLM(str(path), device="cpu", threads=1), [prompt])[0] for prompt in PROMPTS]


def tokens_of(llm: LLM, prompts: list[str]) -> list[list[int]]:
    with llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, SAMPLED)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"threads": 2},
        {"spec_type": "ngram"},
        {"parallel": 3},
        {"cache_type_k": "i8", "cache_type_v": "i8"},
    ],
    ids=str,
)
def test_a_list_has_the_tokens_of_its_prompts(
    path: Path, answers: list[list[int]], settings: dict[str, object]
) -> None:
    """One prompt begins with another, whose prefix is kept. With narrower keys the text is another one."""
    found = tokens_of(LLM(str(path), device="cpu", **settings), PROMPTS)
    if "cache_type_k" in settings:
        answers = [tokens_of(LLM(str(path), device="cpu", threads=1, **settings), [p])[0] for p in PROMPTS]
    assert found == answers


def test_experts_from_the_disk_change_no_token(path: Path, answers: list[list[int]]) -> None:
    ram = least_ram(path, context_length=256)
    with LLM(str(path), device="cpu", ram=ram, ctx_size=256, threads=2) as llm:
        outputs = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, SAMPLED)]
        assert llm.opened.runner.disk is not None
        assert llm.opened.runner.disk.misses > 0
    assert outputs == answers


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_with_half_of_the_experts(family: str, tmp_path: Path) -> None:
    """The dense layer of Laguna has none to place."""
    dims = Dims(layers=3, experts=8, experts_used=3)
    (path,) = write_gguf(tmp_path / "model.gguf", family, types=TYPES, dims=dims)
    with (
        open_cpu(path, threads=1, context_length=256) as plain,
        open_partly(path, 0.5, streamed=0.5) as runner,
    ):
        check_chains(runner, plain, (1, 5, 40))
        assert runner.expert_uses is not None
        assert runner.expert_uses[1] > 0


def test_both_end_tokens_end_an_answer(tmp_path: Path) -> None:
    """The converter writes the end of a text and the end of a turn under two keys."""
    model = make_model("laguna")
    model.metadata |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 24}
    (path,) = write_model(tmp_path / "laguna.gguf", model)
    with LLM(str(path), device="cpu") as llm:
        for token_id, is_end in ((2, True), (24, True), (23, False)):
            params = SamplingParams(max_tokens=3, logit_bias={token_id: 100.0})
            (output,) = llm.generate([PROMPTS[0]], params)
            assert (output.outputs[0].finish_reason == "stop") == is_end


def test_a_plan_counts_layers_by_their_windows(tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "laguna.gguf", "laguna")
    with LLM(str(path), device="cpu") as llm:
        sizes = llm.opened.planned.sizes
        assert [each.window for each in sizes.windows] == [5]
        assert sizes.windows[0].cache_share == 0.75
        assert sizes.placed_layers == (1, 2, 3)
        assert sizes.cached_bytes(100) == sizes.kv_token_bytes * (0.25 * 100 + 0.75 * 5)
        assert np.array_equal(llm.logits([1, 2, 3]), llm.logits(np.array([1, 2, 3])))
