"""Models of new families through the whole program: budgets, disk, lists, kept prefixes, drafts, a GPU."""

from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import check_chains, open_partly
from one_sequence import OneSequence, open_cpu
from tree_cases import Tree

from builders import Dims, make_model, write_gguf, write_model
from coldstream import LLM, SamplingParams
from coldstream.kvcache import Batch, CacheSize, Segment
from dflash_cases import for_target, random_tensors, spec_of, write_converted
from ram_budgets import least_ram

ONE_STREAM = ("laguna", "gpt-oss", "gemma4")  # which a drafter of another model reads
FAMILIES = (*ONE_STREAM, "qwen4exp")
OPTIONS = {"qwen4exp": {"ngrams": True}}
TYPES = {"*_exps.weight": "Q4_K", "*.ffn_down_exps.weight": "Q6_K"}
DIMS = Dims(experts=32, experts_used=4)
# Beside others, rows at the same position, and rows whose windows of five begin behind a fork.
TREE = Tree([5, 6, 7, 8, 9, 10, 11, 12], [-1, 0, 0, 1, 1, 3, 5, -1])
PROMPTS = ["def f(x):\n    return", "the other", "def f(x):\n    return x + 1\n\nthe"]
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return write_family(path, request.param, DIMS)


def write_family(path: Path, family: str, dims: Dims) -> Path:
    """Whose texts are too short for what only long ones need."""
    model = make_model(family, types=TYPES, dims=dims, **OPTIONS.get(family, {}))
    model.metadata[f"{family}.context_length"] = 2000
    return write_model(path, model)[0]


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


@pytest.mark.parametrize("path", ONE_STREAM, indirect=True)
def test_drafts_of_another_model_change_no_token(
    path: Path, answers: list[list[int]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By a drafter with random weights, of the kind that is published for the family."""
    family = request.node.callspec.params["path"]
    values = for_target({"laguna": "Laguna", "gpt-oss": "gpt-oss"}.get(family, "first"), DIMS)
    if family == "gemma4":
        values["final_logit_softcapping"] = 4.0
    draft = write_converted(tmp_path / "drafter", values, random_tensors(spec_of(values)))
    settings = {"model_draft": str(draft), "tree_budget": 6, "threads": 2}
    with LLM(str(path), device="cpu", **settings) as llm:
        outputs = [llm.generate(prompt, SAMPLED)[0] for prompt in PROMPTS]
    assert [list(output.outputs[0].token_ids) for output in outputs] == answers
    for output in outputs:
        assert output.statistics.speculation is not None
        assert output.statistics.speculation.drafter == "dflash"
        assert output.statistics.speculation.drafted > 40


def check_tree(runner: OneSequence, plain: OneSequence, prompt: list[int]) -> None:
    """Rows of a tree have the bits of chains, and so has what follows a commit of a path."""
    runner.reset()
    runner.extend(prompt)
    (found,) = runner.step(Batch((Segment(runner.sequence, TREE.token_ids, TREE.parents),)))
    logits = np.array(found)
    for row in range(len(TREE.token_ids)):
        plain.reset()
        plain.extend(prompt)
        expected = plain.extend([TREE.token_ids[each] for each in TREE.path(row)])
        assert np.array_equal(logits[row], expected)
    runner.commit(runner.sequence, [0, 1, 3])
    plain.reset()
    plain.extend([*prompt, 5, 6, 8])
    for token in (20, 21, 22, 23):
        assert np.array_equal(np.array(runner.extend([token])), plain.extend([token]))


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_on_a_gpu_with_half_of_the_experts(family: str, tmp_path: Path) -> None:
    """With sinks, windows that differ by layer, gates, and n-grams."""
    path = write_family(
        tmp_path / "model.gguf", family, Dims(layers=3, interval=3, experts=8, experts_used=3)
    )
    size = CacheSize.of(2, 256, num_trees=1)
    with (
        open_cpu(path, threads=1, context_length=256) as plain,
        open_partly(path, 0.5, streamed=0.5, cache_size=size) as runner,
    ):
        for length in (2, 9):
            check_tree(runner, plain, list(range(40, 40 + length)))


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_with_half_of_the_experts(family: str, tmp_path: Path) -> None:
    """The dense layer of Laguna has none to place. Of qwen4exp, n-grams enter the layer that is not first."""
    path = write_family(
        tmp_path / "model.gguf", family, Dims(layers=3, interval=3, experts=8, experts_used=3)
    )
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
