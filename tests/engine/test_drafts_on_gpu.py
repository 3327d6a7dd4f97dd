"""Answers of a GPU with drafts are those without, wherever experts lie; on the host too."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from scripted_drafts import KINDS, Scripted, check_same

from bench.runners import open_model_file
from builders import SMALL_EXPERTS, write_gguf
from coldstream.assets import demo_model_path
from coldstream.decoding import Drafter, FixedSizes, Speculation
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter
from coldstream.engine import LLM, SamplingParams
from coldstream.engine.opened_model import OpenedModel
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache import CacheSize
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.mtp.sidecar import join_sidecar
from coldstream.models.runner_capacity import DraftMemory
from coldstream.placement.controls import Controls, Moves
from hash_runner import opened_with
from random_controls import RandomSizes, moving_at_random
from sidecar_files import make_whole, write_split
from tree_plans import plan_with_trees

CONTEXT = 192
SIZE = CacheSize.of(3, CONTEXT, num_trees=1)
PROMPTS = ["def add(a, b):\n", "import os\nimport sys\n\n\ndef main() -> None:\n    ", "class Shape:"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SEEDED = SamplingParams(seed=3, max_tokens=32)
PARAMS = [
    GREEDY,
    SEEDED,
    replace(SEEDED, frequency_penalty=0.4, repeat_last_n=16, logprobs=2),
    replace(GREEDY, stop=["return", "\n\n"], min_tokens=4),
]


def scripted(
    kind: str,
    plain: LLM,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    wants_hidden: bool,
    num_tokens: int = 48,
) -> Scripted:
    """A drafter that knows so many tokens of the plain model's answers."""
    outputs = plain.generate(list(prompts), replace(params, max_tokens=num_tokens))
    answers = {output.prompt_token_ids: output.token_ids for output in outputs}
    tokenizer = plain.opened.tokenizer
    end_id = min(tokenizer.eos_ids, default=0)
    return Scripted(kind, answers, tokenizer.vocab_size, end_id, wants_hidden=wants_hidden)


def check_drafts(
    plain: LLM,
    opened: OpenedModel,
    drafter: Drafter,
    prompts: Sequence[Any],
    params: SamplingParams,
    budget: int,
) -> float:
    """Tokens a step over all prompts, of which the last is continued from the state of its answer."""
    llm = LLM.from_opened(replace(opened, speculation=Speculation(drafter, FixedSizes(budget))))
    steps = []
    for prompt in prompts:
        (expected,), (found,) = plain.generate(prompt, params), llm.generate(prompt, params)
        check_same(expected, found)
        steps.append(found.statistics.speculation.tokens_per_step)
    longer = [*found.prompt_token_ids, *found.token_ids, 5, 6]
    (expected,), (found,) = plain.generate(longer, params), llm.generate(longer, params)
    check_same(expected, found)
    assert found.statistics.reused_tokens == expected.statistics.reused_tokens > 0
    llm.forget()
    return sum(steps) / len(steps)


def open_runner(
    path: Path,
    *,
    share: float | None,
    has_mtp: bool,
    streamed: float = 0.0,
    sidecar: str | None = None,
) -> CudaRunner:
    """With room for trees, and the block of a sidecar. The rest as for `plan_with_trees`."""
    file, spec = open_model_file(path)
    if sidecar is not None:
        spec = join_sidecar(file, spec, GGUFFile.open(sidecar))
    spec_type = "mtp" if has_mtp else "none"
    plan = plan_with_trees(
        file, spec, CONTEXT, SIZE, share, DraftMemory(has_mtp=has_mtp), spec_type, streamed
    )
    return CudaRunner.load(file, spec, plan, cache_size=SIZE)


@contextmanager
def on_the_host(
    path: Path, *, has_mtp: bool, share: float | None = None, streamed: float = 0.0
) -> Iterator[OpenedModel]:
    with open_runner(path, share=share, has_mtp=has_mtp, streamed=streamed) as runner:
        yield opened_with(runner, CONTEXT)


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arch", "has_mtp", "share"),
    [
        ("qwen35moe", False, None),
        ("qwen35moe", True, None),
        ("qwen35moe", True, 0.5),
        ("qwen4exp", True, None),
    ],
)
def test_drafts_on_the_host(tmp_path: Path, arch: str, has_mtp: bool, share: float | None) -> None:
    parts = {"nextn": has_mtp, "quant": "Q8_0", "dims": SMALL_EXPERTS}
    if arch == "qwen4exp":
        parts |= {"ngrams": True, "dims": replace(SMALL_EXPERTS, layers=3, interval=3)}
    (path,) = write_gguf(tmp_path / "tiny.gguf", arch, **parts)
    params = replace(SEEDED, max_tokens=6, ignore_eos=True)
    prompts = [[1, 2, 3, 1, 2]]
    with (
        on_the_host(path, has_mtp=False) as plain_model,
        on_the_host(path, has_mtp=has_mtp, share=share) as opened,
    ):
        plain = LLM.from_opened(plain_model)
        if has_mtp:
            check_drafts(
                plain, opened, MtpDrafter(opened.runner.load_mtp().new_sequence()), prompts, params, 3
            )
        for kind in ("right", "random"):
            drafter = scripted(kind, plain, prompts, params, wants_hidden=has_mtp, num_tokens=12)
            tokens_per_step = check_drafts(plain, opened, drafter, prompts, params, 4)
            assert kind == "random" or tokens_per_step > 2


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
def test_a_block_in_a_file_of_its_own_drafts_on_the_host(tmp_path: Path) -> None:
    """With several residual streams, and tokens that a CPU chose."""
    _, trunk, sidecar = write_split(tmp_path, make_whole("qwen4exp", dims=SMALL_EXPERTS), shares=True)
    params, prompt = replace(SEEDED, max_tokens=5, ignore_eos=True), [1, 2, 3, 1, 2]
    with LLM(trunk, device="cpu", ctx_size=CONTEXT, spec_type="none") as plain:
        (expected,) = plain.generate(prompt, params)
    with open_runner(Path(trunk), share=None, has_mtp=True, sidecar=sidecar) as runner:
        speculation = Speculation(MtpDrafter(runner.load_mtp().new_sequence()), FixedSizes(3))
        llm = LLM.from_opened(replace(opened_with(runner, CONTEXT), speculation=speculation))
        (found,) = llm.generate(prompt, params)
    check_same(expected, found)
    assert found.statistics.speculation.drafted > 3


@pytest.mark.usefixtures("gpu")
def test_draft_sizes_and_shares_at_random_change_no_answer(tmp_path: Path) -> None:
    """Whatever sizes by cost and the bound of what drafts lose choose is among them."""
    (path,) = write_gguf(tmp_path / "tiny.gguf", "qwen35moe", dims=SMALL_EXPERTS, nextn=True, quant="Q8_0")
    params, prompt = replace(SEEDED, max_tokens=24, ignore_eos=True), [1, 2, 3, 1, 2]
    sizes = RandomSizes(np.random.default_rng(5), most=4)
    with (
        on_the_host(path, has_mtp=False) as plain_model,
        on_the_host(path, has_mtp=True, share=0.5, streamed=0.5) as opened,
        moving_at_random(opened.runner, sizes.rng),
    ):
        assert isinstance(opened.runner, CudaRunner)
        opened.runner.control(Controls(Moves.ALWAYS, Moves.ALWAYS))
        plain = LLM.from_opened(plain_model)
        for kind in ("mtp", "right", "random"):
            drafter: Drafter = MtpDrafter(opened.runner.load_mtp().new_sequence())
            if kind != "mtp":
                drafter = scripted(kind, plain, [prompt], params, wants_hidden=True)
            llm = LLM.from_opened(replace(opened, speculation=Speculation(drafter, sizes)))
            (expected,), (found,) = plain.generate(prompt, params), llm.generate(prompt, params)
            check_same(expected, found)
            llm.forget()
        assert opened.runner.gpu_experts is not None
        assert opened.runner.gpu_experts.shares is not None
    assert len(sizes.num_verified) >= sizes.most


@pytest.fixture(scope="module", params=[None, 0.4, 0.0], ids=["resident", "partly", "none"])
def models(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """The demo model, resident without drafts, and with room for them and a share of the experts in slots."""
    with (
        LLM(demo_model_path(), device="cuda", ctx_size=CONTEXT) as plain,
        open_runner(demo_model_path(), share=request.param, has_mtp=True) as runner,
    ):
        yield plain, LLM.from_opened(replace(plain.opened, runner=runner))


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded", "penalties", "stops"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_draft_leaves_the_answers(models: tuple[LLM, LLM], kind: str, params: SamplingParams) -> None:
    plain, drafting = models
    budget = (1, 2, 3, 7, 8, 15, 16, 22, 63)[(KINDS.index(kind) + PARAMS.index(params)) % 9]
    drafter = scripted(kind, plain, PROMPTS, params, wants_hidden=True)
    check_drafts(plain, drafting.opened, drafter, PROMPTS, params, budget)


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded", "penalties", "stops"])
@pytest.mark.parametrize("budget", [1, 3, 8, 24])
def test_the_products_own_drafters_leave_the_answers(
    models: tuple[LLM, LLM], budget: int, params: SamplingParams
) -> None:
    plain, drafting = models
    drafters = MtpDrafter(drafting.opened.runner.load_mtp().new_sequence()), NgramDrafter()
    for drafter in drafters:
        tokens_per_step = check_drafts(plain, drafting.opened, drafter, PROMPTS, params, budget)
        assert drafter.name == "ngram" or params is not GREEDY or tokens_per_step > 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("spec_type", ["mtp", "ngram"])
def test_sizes_by_cost_leave_the_answers(spec_type: str) -> None:
    options = {"device": "cuda", "ctx_size": CONTEXT}
    with (
        LLM(demo_model_path(), **options) as plain,
        LLM(demo_model_path(), spec_type=spec_type, **options) as drafting,
    ):
        for params in PARAMS:
            for prompt in PROMPTS:
                (expected,), (found,) = plain.generate(prompt, params), drafting.generate(prompt, params)
                check_same(expected, found)
                assert found.statistics.speculation is not None
