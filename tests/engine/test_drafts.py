"""Answers with drafts, right or wrong, are those without, to the last statistic that is not of drafts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_drafts import BUDGETS, KINDS, Scripted, check_same

from builders import Dims, make_model, write_gguf, write_model
from coldstream.assets import demo_model_path
from coldstream.decoding import FixedSizes, SizesByCost, Speculation, TokenTree
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter
from coldstream.engine import LLM, EngineConfig, RequestOutput, SamplingParams, open_model
from coldstream.errors import ConfigError, InconsistentError, InvalidRequestError
from coldstream.models.cpu.runner import CpuRunner

NOT_DRAFTED = {"spec_type": "none"}
PROMPTS = ["def add(a, b):\n", "import os\nimport sys\n\n\ndef main() -> None:\n    ", "class Shape:"]


class Pair:
    """A model without drafts and the same with a scripted drafter."""

    def __init__(self, path: Path, ctx_size: int = 512) -> None:
        config = EngineConfig(str(path), device="cpu", threads=1, ctx_size=ctx_size)
        self.plain = LLM.from_opened(open_model(replace(config, spec_type="none")))
        self.opened = open_model(replace(config, spec_type="ngram"))
        self._last: LLM | None = None
        self._expected: dict[tuple[str, str], RequestOutput] = {}
        self.vocab_size = self.opened.runner.spec.vocab_size

    def speculating(self, drafter: Any, sizes: FixedSizes | SizesByCost) -> LLM:
        """An LLM over the same runner; the one before gives its sequence up."""
        if self._last is not None:
            self._last.forget()
        self._last = LLM.from_opened(replace(self.opened, speculation=Speculation(drafter, sizes)))
        return self._last

    def expected(self, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        """The answer without drafts, computed once."""
        key = repr(prompt), repr(params)
        if key not in self._expected:
            (self._expected[key],) = self.plain.generate(prompt, params)
        return self._expected[key]

    def scripted(self, kind: str, prompts: Sequence[str], params: SamplingParams) -> Scripted:
        outputs = [self.expected(prompt, replace(params, max_tokens=64)) for prompt in prompts]
        answers = {output.prompt_token_ids: output.token_ids for output in outputs}
        end_id = min(self.opened.tokenizer.eos_ids)
        return Scripted(kind, answers, self.vocab_size, end_id)

    def close(self) -> None:
        self.plain.close()
        self.opened.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    pair = Pair(demo_model_path())
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    (path,) = write_gguf(tmp_path_factory.mktemp("drafts") / "tiny.gguf", "qwen35", quant="Q4_K")
    pair = Pair(path)
    yield pair
    pair.close()


PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40),
    "seeded": SamplingParams(seed=3, max_tokens=40),
    "penalties": SamplingParams(seed=4, max_tokens=40, frequency_penalty=0.4, repeat_last_n=16, logprobs=2),
    "stops": SamplingParams(temperature=0.0, max_tokens=40, stop=["return", "\n\n"]),
    "least": SamplingParams(temperature=0.0, max_tokens=40, min_tokens=20),
}


@pytest.mark.sharded(9)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_sp01_any_draft_leaves_the_answers_of_the_demo_model(
    demo: Pair, kind: str, params: SamplingParams
) -> None:
    drafter = demo.scripted(kind, PROMPTS, params)
    budget = BUDGETS[(KINDS.index(kind) + len(PARAMS)) % len(BUDGETS)]
    llm = demo.speculating(drafter, FixedSizes(budget))
    for prompt in PROMPTS:
        plain, (drafted,) = demo.expected(prompt, params), llm.generate(prompt, params)
        check_same(plain, drafted)
        if kind == "right" and plain.statistics.generated_tokens > 8:
            assert drafted.statistics.speculation.tokens_per_step > min(budget, 4)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["right", "random"])
def test_sp01_sp05_trap_more_than_four_drafts_leave_the_answers_of_a_dense_model(
    tiny: Pair, kind: str, budget: int
) -> None:
    params = SamplingParams(seed=budget, max_tokens=64, ignore_eos=True)
    llm = tiny.speculating(tiny.scripted(kind, PROMPTS, params), FixedSizes(budget))
    for prompt in PROMPTS:
        check_same(tiny.expected(prompt, params), llm.generate(prompt, params)[0])


@pytest.mark.sharded(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [1, 3, 4, 10])
def test_sp08_a_stream_that_is_left_within_a_run_goes_on_as_without_drafts(
    demo: Pair, kind: str, taken: int
) -> None:
    llms = [demo.plain, demo.speculating(demo.scripted(kind, PROMPTS, PARAMS["greedy"]), FixedSizes(6))]
    texts = []
    for llm in llms:
        llm.forget()
        stream = llm.stream(PROMPTS[1], PARAMS["greedy"])
        tokens = [token for _, piece in zip(range(taken), stream, strict=False) for token in piece.token_ids]
        stream.close()
        prompt = [*llm.opened.tokenizer.encode(PROMPTS[1]), *tokens]
        (output,) = llm.generate(prompt, PARAMS["greedy"])
        texts.append(output.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("spec_type", ["mtp", "ngram"])
@pytest.mark.parametrize("tree_budget", ["auto", 3])
def test_the_products_own_drafters_leave_the_answers(
    demo: Pair, spec_type: str, tree_budget: int | str
) -> None:
    config = EngineConfig(
        str(demo_model_path()),
        device="cpu",
        threads=1,
        ctx_size=512,
        spec_type=spec_type,
        tree_budget=tree_budget,
    )
    with LLM.from_opened(open_model(config)) as llm:
        for params in (PARAMS["greedy"], PARAMS["penalties"]):
            for prompt in PROMPTS:
                plain, (drafted,) = demo.expected(prompt, params), llm.generate(prompt, params)
                check_same(plain, drafted)
                speculation = drafted.statistics.speculation
                assert speculation.steps + speculation.accepted == len(drafted.token_ids) - 1
                if (spec_type, tree_budget, params) == ("mtp", 3, PARAMS["greedy"]):
                    assert speculation.tokens_per_step > 1.8
        chat = llm.generate("def f(x):", PARAMS["greedy"])[0]
        longer = llm.generate([*chat.prompt_token_ids, *chat.token_ids], PARAMS["greedy"])[0]
        assert longer.statistics.reused_tokens == len(chat.prompt_token_ids) + len(chat.token_ids) - 1


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("spec_type", ["mtp", "ngram"])
def test_trap_40_trap_ngram_corrupts_states_256_greedy_tokens_and_what_follows(
    demo: Pair, spec_type: str
) -> None:
    """The bundled model has recurrent layers, whose states the next turn begins with."""
    runner = demo.opened.runner
    drafter = NgramDrafter() if spec_type == "ngram" else MtpDrafter(runner.load_mtp().new_sequence())
    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
    llm = demo.speculating(drafter, FixedSizes(7))
    plain, (drafted,) = demo.expected(PROMPTS[1], params), llm.generate(PROMPTS[1], params)
    check_same(plain, drafted)
    assert drafted.statistics.speculation.accepted > 40
    longer = [*plain.prompt_token_ids, *plain.token_ids, 5]
    next_turn = replace(params, max_tokens=8)
    expected, (found,) = demo.expected(longer, next_turn), llm.generate(longer, next_turn)
    check_same(expected, found)
    assert found.statistics.reused_tokens == len(longer) - 2
    llm.forget()


def test_sp01_a_draft_beyond_the_vocabulary_is_refused_before_it_is_computed(demo: Pair) -> None:
    """No drafter of a model's own vocabulary makes one; the engine goes on with what it had."""

    class Beyond(Observing):
        def propose(self, context: Sequence[int], budget: int) -> TokenTree:
            return TokenTree((self.vocab_size,), (-1,), (0.0,))

    expected = demo.expected(PROMPTS[0], PARAMS["greedy"])
    llm = demo.speculating(Beyond("wrong", {}, demo.vocab_size), FixedSizes(1))
    with pytest.raises(InvalidRequestError, match="token ids"):
        llm.generate(PROMPTS[0], PARAMS["greedy"])
    right = demo.scripted("right", PROMPTS[:1], PARAMS["greedy"])
    (found,) = demo.speculating(right, FixedSizes(7)).generate(PROMPTS[0], PARAMS["greedy"])
    check_same(expected, found)


class Sleepy(FixedSizes):
    """Chains of 3 nodes, but for a while of every while."""

    def __init__(self) -> None:
        super().__init__(3)
        object.__setattr__(self, "asked", [])

    def is_idle(self, num_sequences: int = 1) -> bool:
        return len(self.asked) % 20 >= 10

    def budget(self, most: int, num_sequences: int = 1) -> int:
        self.asked.append(most)
        return 0 if self.is_idle() else super().budget(most)


class Observing(Scripted):
    """Observes gaps too."""

    gaps: int = 0

    def truncate(self, length: int) -> None:
        self.gaps += length > len(self.token_ids)
        self.token_ids = [*self.token_ids, *[-1] * length][:length]

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        if len(self.token_ids) + 1 != len(context):
            return TokenTree()
        assert all(mine in (-1, token) for mine, token in zip(self.token_ids, context, strict=False))
        return self.drafted(context, budget)


@pytest.mark.sharded(of="models on the CPU")
def test_sp10_drafting_that_pauses_and_goes_on_leaves_the_answer(demo: Pair) -> None:
    params = replace(PARAMS["greedy"], max_tokens=120, ignore_eos=True)
    plain = demo.expected(PROMPTS[0], params)
    drafter = Observing("right", {plain.prompt_token_ids: plain.token_ids}, demo.vocab_size)
    llm = demo.speculating(drafter, Sleepy())
    for prompt in (PROMPTS[0], [*plain.prompt_token_ids, *plain.token_ids]):
        expected, (drafted,) = demo.expected(prompt, params), llm.generate(prompt, params)
        check_same(expected, drafted)
    assert drafter.gaps >= 2
    assert -1 in drafter.token_ids


@pytest.mark.sharded(of="models on the CPU")
def test_lists_and_several_answers_have_the_same_text_with_drafts(demo: Pair) -> None:
    answers = demo.scripted("right", PROMPTS, PARAMS["greedy"]).answers
    llm = demo.speculating(Observing("right", answers, demo.vocab_size), FixedSizes(4))
    params = replace(PARAMS["seeded"], n=2)
    both = [[each.outputs for each in model.generate(PROMPTS, params)] for model in (demo.plain, llm)]
    for plain, listed in zip(*both, strict=True):
        assert [each.token_ids for each in plain] == [each.token_ids for each in listed]
    assert llm.generate(PROMPTS[0], PARAMS["greedy"])[0].token_ids


def test_a_file_without_a_block_has_no_drafts_by_default(tiny: Pair) -> None:
    path = str(tiny.opened.runner.file.paths[0])
    with LLM(path, device="cpu") as llm:
        assert llm.opened.plan.spec_type == "none"
        assert llm.generate("def", PARAMS["greedy"])[0].statistics.speculation is None
    with pytest.raises(ConfigError, match="no block for multi-token prediction: name a file"):
        LLM(path, device="cpu", spec_type="mtp")


@pytest.mark.sharded(of="models on the CPU")
def test_a_damaged_block_is_an_error_where_it_is_asked_for(tmp_path: Path) -> None:
    model = make_model(nextn=True)
    model.tensors["blk.4.nextn.enorm.weight"][:] = np.inf
    path = str(write_model(tmp_path / "damaged.gguf", model)[0])
    with LLM(path, device="cpu") as llm:
        assert llm.generate("def", PARAMS["greedy"])[0].token_ids
    with pytest.raises(InconsistentError, match="enorm"):
        LLM(path, device="cpu", spec_type="mtp")


def test_the_memory_of_drafts_is_in_the_plan(demo: Pair) -> None:
    config = EngineConfig(str(demo_model_path()), device="cpu", ctx_size=256)
    plain = open_model(config)
    assert plain.plan.spec_type == "none"
    need = plain.plan.placement.total_bytes
    plain.close()
    drafting = open_model(replace(config, spec_type="mtp"))
    fixed, runner = drafting.plan.placement.fixed, drafting.runner
    assert isinstance(runner, CpuRunner)
    assert fixed.drafter == runner.load_mtp().num_bytes
    assert fixed.num_tree_rows == 64
    assert drafting.plan.placement.total_bytes > need + fixed.drafter
    drafting.close()
    scarce = open_model(replace(config, ram=need, spec_type="mtp"))
    assert scarce.plan.spec_type == "mtp"
    assert not scarce.plan.placement.is_all_resident
    scarce.close()


def deep_model(folder: Path) -> str:
    """Of which the block is a small part, so that it drafts by default."""
    return str(write_gguf(folder / "deep.gguf", nextn=True, dims=Dims(layers=16, experts=4, vocab=300))[0])


def test_a_block_that_drafts_by_default_changes_no_token(tmp_path: Path) -> None:
    """It drafts a little at first, whatever pays, so that this is seen."""
    path = deep_model(tmp_path)
    by_default, without = (LLM(path, device="cpu", ctx_size=256, **each) for each in ({}, NOT_DRAFTED))
    with by_default, without:
        assert (by_default.opened.plan.spec_type, without.opened.plan.spec_type) == ("mtp", "none")
        params = replace(PARAMS["greedy"], max_tokens=64, ignore_eos=True)
        for each in (params, replace(PARAMS["seeded"], max_tokens=24)):
            (found,), (expected,) = (llm.generate("def", each) for llm in (by_default, without))
            assert found.token_ids == expected.token_ids
            assert expected.statistics.speculation is None
        (found,) = by_default.generate("def", params)
        assert found.statistics.speculation is not None
        assert found.statistics.speculation.steps > 0


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize(("has_ngrams", "top_k"), [(False, 2048), (True, 2048), (True, 16)])
def test_a_block_of_several_streams_changes_no_token(tmp_path: Path, has_ngrams: bool, top_k: int) -> None:
    """Also beyond the positions that an indexer leaves whole."""
    parts = {"nextn": True, "ngrams": has_ngrams, "quant": "Q8_0", "dims": Dims(context=512, top_k=top_k)}
    (path,) = write_gguf(tmp_path / "streams.gguf", "qwen4exp", **parts)
    options: dict[str, Any] = {"device": "cpu", "ctx_size": 256, "threads": 2}
    drafts = {"spec_type": "mtp", "tree_budget": 5}
    with LLM(str(path), **options, **drafts) as drafting, LLM(str(path), **options, **NOT_DRAFTED) as plain:
        for name in ("greedy", "seeded", "penalties"):
            params = replace(PARAMS[name], ignore_eos=True)
            for prompt in (PROMPTS[1], [5, 6, 7, 5, 6]):
                (found,), (expected,) = (llm.generate(prompt, params) for llm in (drafting, plain))
                check_same(expected, found)
                assert found.statistics.speculation is not None
                assert found.statistics.speculation.drafted > 60


def test_what_drafts_lose_is_bounded_where_nobody_asked_for_them(tmp_path: Path) -> None:
    path = deep_model(tmp_path)
    for options, is_bounded in (({}, True), ({"spec_type": "mtp"}, False)):
        with LLM(path, device="cpu", ctx_size=256, **options) as llm:
            speculation = llm.opened.speculation
            assert speculation is not None
            assert isinstance(speculation.sizes, SizesByCost)
            assert speculation.sizes.is_bounded is is_bounded
