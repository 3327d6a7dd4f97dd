"""Prefetching is decided when a model is opened, and changes no token."""

from dataclasses import replace
from pathlib import Path

import pytest

from coldstream.assets import demo_model_path
from coldstream.engine import LLM, EngineConfig, SamplingParams
from coldstream.engine.machine import hardware_with
from coldstream.engine.planning import plan_model
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import find_gpu
from coldstream.models.spec import ModelSpec
from coldstream.placement.hardware import Hardware

PROMPT = list(range(300, 340))
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def budget_for_a_part_of_the_experts(hardware: Hardware) -> int:
    """In bytes. A smaller one is also planned with a smaller workspace."""
    config = EngineConfig(str(demo_model_path()), device="cuda", vram="64G", ctx_size=256)
    with GGUFFile.open(demo_model_path()) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        while (planned := plan_model(config, file, spec, hardware)).plan.is_all_resident:
            less = planned.plan.total_bytes - planned.sizes.all_expert_bytes // 4
            config = replace(config, vram=less)
    assert planned.plan.num_resident > 0
    return planned.plan.budget_bytes


def test_auto_is_a_number_once_a_model_is_open() -> None:
    with LLM(demo_model_path(), device="cpu", ctx_size=64) as llm:
        assert llm.opened.config.prefetch == 0


@pytest.mark.gpu
def test_what_was_decided_is_done_and_the_text_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where the machine's rates are kept
    budget = budget_for_a_part_of_the_experts(hardware_with(find_gpu()))
    texts = set()
    for asked in ("auto", 0, 2):
        with LLM(demo_model_path(), device="cuda", vram=budget, ctx_size=256, prefetch=asked) as llm:
            count = llm.opened.config.prefetch
            assert count in ((0, 2) if asked == "auto" else (asked,))
            (output,) = llm.generate([PROMPT], GREEDY)
            texts.add(output.token_ids)
            experts = llm.opened.runner.gpu_experts
            assert experts is not None
            assert (experts.prefetch is not None) == bool(count)
    assert len(texts) == 1
