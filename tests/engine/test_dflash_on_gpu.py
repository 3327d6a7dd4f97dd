"""A DFlash drafter beside a model on a GPU reads residual streams there, and changes no answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from test_drafts_on_gpu import open_runner
from test_fused_steps_on_gpu import DEPTHS, Models, check_engine

from bench.engine.scripted_fused_steps import script_fused_steps
from bench.runners import fixed_part_on_gpu, open_model_file
from builders import SMALL_EXPERTS, write_gguf
from coldstream.assets import demo_drafter_path, demo_model_path
from coldstream.decoding import FixedSizes, Speculation
from coldstream.decoding.drafters import DflashDrafter
from coldstream.engine import LLM, RequestOutput, SamplingParams, fused_steps
from coldstream.engine.drafting import open_speculation
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache import CacheSize
from coldstream.models.cuda import dflash as cuda_dflash
from coldstream.models.cuda.dflash import CudaDflashSequence
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import check_target
from coldstream.models.footprint import model_sizes
from coldstream.models.runner_capacity import DraftMemory
from coldstream.planning.memory import GpuMemory
from dflash_cases import for_target, random_tensors, spec_of, write_converted
from hash_runner import opened_with
from tree_plans import plan_with_trees

CONTEXT = 192
SIZE = CacheSize.of(3, CONTEXT, num_trees=1)
AUX_LAYERS = (0, 1)
BUDGET = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def add(a, b):\n", "import os\nimport sys\n\n\ndef main() -> None:\n    ", "class Shape:"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (path,) = write_gguf(tmp_path / "tiny.gguf", "qwen35moe", dims=SMALL_EXPERTS, quant="Q8_0")
    return path


def random_drafter(folder: Path, kind: str) -> DflashFile:
    values = for_target(kind, SMALL_EXPERTS, AUX_LAYERS)
    return DflashFile.open(write_converted(folder, values, random_tensors(spec_of(values))))


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize(
    ("target", "kind"),
    [("qwen35moe", "first"), ("qwen35moe", "second"), ("laguna", "Laguna"), ("gpt-oss", "gpt-oss")],
)
def test_drafts_on_the_host(tmp_path: Path, share: float | None, target: str, kind: str) -> None:
    params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
    (tiny,) = write_gguf(tmp_path / "tiny.gguf", target, dims=SMALL_EXPERTS, quant="Q8_0")
    file, spec = open_model_file(tiny)
    plan = plan_with_trees(file, spec, CONTEXT, SIZE, share, DraftMemory(aux_layers=AUX_LAYERS), "dflash")
    plan = replace(plan, tree_budget=BUDGET)
    with (
        LLM(tiny, device="cpu", threads=1, ctx_size=CONTEXT, spec_type="none") as plain,
        CudaRunner.load(file, spec, plan, cache_size=SIZE, aux_layers=AUX_LAYERS) as runner,
        random_drafter(tmp_path / "drafter", kind) as draft,
    ):
        check_target(draft.spec, spec)
        speculation = open_speculation(plan, runner, draft)
        drafting = LLM.from_opened(replace(opened_with(runner, CONTEXT), speculation=speculation))
        (expected,), (found,) = plain.generate([1, 2, 3], params), drafting.generate([1, 2, 3], params)
        assert found.token_ids == expected.token_ids
        statistics = found.statistics.speculation
        assert statistics.drafter == "dflash"
        assert statistics.drafted >= 2 * BUDGET
        assert statistics.fused_steps == (statistics.steps if share is None else 0)


def answer_with(
    runner: CudaRunner, draft: DflashFile, answers: dict[tuple[int, ...], tuple[int, ...]], *, is_fused: bool
) -> tuple[list[RequestOutput], CudaDflashSequence]:
    """Answers to these prompts in turn, with drafts of which two tokens are right; and
    what the drafter knows of the last one.
    """
    drafting = runner.load_dflash(draft)
    if is_fused:
        script = script_fused_steps(drafting, CONTEXT, draft.spec.block_size)
    else:
        drafting.fused = None
    context = drafting.new_sequence()
    speculation = Speculation(DflashDrafter(context), FixedSizes(BUDGET))
    llm = LLM.from_opened(replace(opened_with(runner, CONTEXT), speculation=speculation))
    found = []
    for prompt, answer in answers.items():
        if is_fused:
            text = [*prompt, *answer, *[0] * draft.spec.block_size]
            for position in range(len(prompt) - 1, len(prompt) + len(answer)):
                script[position, :2] = np.array(text[position + 1 : position + 3], np.int32)
        found += llm.generate(list(prompt), GREEDY)
    return found, context


@pytest.mark.sharded(2)
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["first", "second"])
def test_fused_steps_leave_the_context_that_steps_of_the_host_leave(
    tmp_path: Path, tiny: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose memory grows while they run; of texts that continue each other and of another one."""
    monkeypatch.setattr(cuda_dflash, "FIRST_CONTEXT_ROWS", 8)
    with LLM(tiny, device="cpu", threads=1, ctx_size=CONTEXT, spec_type="none") as plain:
        (first,) = plain.generate([1, 2, 3], GREEDY)
        prompts = [[1, 2, 3], [1, 2, 3, *first.token_ids, 9], [7, 8]]
        expected = [plain.generate(prompt, GREEDY)[0] for prompt in prompts]
    answers = {tuple(prompt): each.token_ids for prompt, each in zip(prompts, expected, strict=True)}
    size = CacheSize.of(9, CONTEXT, num_trees=1)  # both answers leave prefixes
    file, spec = open_model_file(tiny)
    plan = plan_with_trees(file, spec, CONTEXT, size, None, DraftMemory(aux_layers=AUX_LAYERS), "dflash")
    with (
        CudaRunner.load(file, spec, plan, cache_size=size, aux_layers=AUX_LAYERS) as runner,
        random_drafter(tmp_path / "drafter", kind) as draft,
    ):
        by_host, plain_context = answer_with(runner, draft, answers, is_fused=False)
        by_device, context = answer_with(runner, draft, answers, is_fused=True)
        for one, other, each in zip(by_host, by_device, expected, strict=True):
            assert one.token_ids == other.token_ids == each.token_ids
            statistics = other.statistics.speculation
            assert statistics.fused_steps == statistics.steps
            assert statistics.tokens_per_step > 2
        assert context.length == plain_context.length == len(prompts[-1]) + GREEDY.max_tokens - 1
        assert context.has_last
        assert plain_context.has_last
        found, wanted = (each.draft(5, 6, 5) for each in (context, plain_context))
        assert np.abs(found.log_probs - wanted.log_probs).max() < 0.05
        positions, plain_positions = (np.asarray(each._rings._positions) for each in (context, plain_context))
        assert np.array_equal(positions, plain_positions)
        there = np.flatnonzero(positions >= 0)
        windows = (layer.window or context.length for layer in draft.spec.layers)
        assert len(there) == sum(min(window, context.length) for window in windows)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_an_engine_drafts_an_answer_that_is_alone(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a few fused steps at a time, and plainly while another one is there."""
    monkeypatch.setattr(fused_steps, "MOST_TOKENS", 4)
    file, spec = open_model_file(tiny)
    plan = plan_with_trees(file, spec, CONTEXT, SIZE, None, DraftMemory(aux_layers=AUX_LAYERS), "dflash")
    with (
        open_runner(tiny, share=None, has_mtp=False) as plain,
        CudaRunner.load(file, spec, plan, cache_size=SIZE, aux_layers=AUX_LAYERS) as runner,
        random_drafter(tmp_path / "drafter", "second") as draft,
    ):
        drafting = runner.load_dflash(draft)
        script = script_fused_steps(drafting, CONTEXT, DEPTHS)
        speculation = Speculation(DflashDrafter(drafting.new_sequence()), FixedSizes(BUDGET))
        opened = replace(opened_with(runner, CONTEXT), speculation=speculation)
        models = Models(LLM.from_opened(opened_with(plain, CONTEXT)), LLM.from_opened(opened), script)
        check_engine(models, [1, 2, 3, 1], replace(GREEDY, temperature=0.9, seed=3, max_tokens=14))


@pytest.mark.parametrize("is_estimated", [False, True], ids=["counted", "estimated"])
def test_the_plan_counts_the_drafter_and_what_is_kept_for_it(is_estimated: bool) -> None:
    aux_layers, num_bytes = (1, 3, 5, 7), 12_345_678
    with GGUFFile.open(demo_model_path()) as file:
        spec = open_model_file(demo_model_path())[1]
        sizes = model_sizes(spec, file.tensors, file.fingerprint, 0)
        room = DraftMemory(SIZE.num_tree_rows)
        counts = None if is_estimated else {}
        without, beside = (
            fixed_part_on_gpu(file, GpuMemory(spec, sizes, 0, counts, CONTEXT, "i16", 1, each), 2**33)
            for each in (room, replace(room, aux_layers=aux_layers, drafter_bytes=num_bytes))
        )
    assert (without.drafter, beside.drafter) == (0, num_bytes)
    rows = beside.chunk_size
    kept = beside.caches - without.caches
    assert 0 <= kept - 2 * rows * len(aux_layers) * spec.hidden_size < 4096
    assert beside.total - without.total == kept + num_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("vram", ["auto", "1100M"])
def test_the_bundled_drafter_is_mostly_right_and_changes_no_token(vram: str) -> None:
    options: dict[str, Any] = {"device": "cuda", "ctx_size": 512, "vram": vram}
    draft = {"spec_type": "dflash", "model_draft": str(demo_drafter_path()), "tree_budget": 7}
    steps = accepted = 0
    with LLM(demo_model_path(), **options) as plain, LLM(demo_model_path(), **options, **draft) as drafting:
        for seed, prompt in enumerate(PROMPTS):
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, seed=seed, max_tokens=96, ignore_eos=True)
                (expected,), (found,) = plain.generate(prompt, params), drafting.generate(prompt, params)
                assert found.token_ids == expected.token_ids
                steps += found.statistics.speculation.steps
                accepted += found.statistics.speculation.accepted
    assert accepted / steps > 1.8
