"""What clients learn of a model, by its plan."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.runners import layers_plan, open_model_file, partial_plan
from builders import write_gguf
from coldstream.placement.hardware import Hardware
from coldstream.server.served_model import EngineFacts

SIZES = {"context_length": 64, "chunk_size": 64, "threads": 1}


@pytest.mark.parametrize(("arch", "counts"), [("qwen35", (0, 0)), ("qwen35moe", (12, 32))])
def test_layers_that_are_placed_like_experts_are_none(
    tmp_path: Path, arch: str, counts: tuple[int, int]
) -> None:
    (path,) = write_gguf(tmp_path / "tiny.gguf", arch)
    file, spec = open_model_file(path)
    if spec.is_moe:
        plan = partial_plan(file, spec, 3, **SIZES, ring_bytes=2**22)
    else:
        plan = layers_plan(file, spec, [0, 2], **SIZES, streamed=0.5)
    opened: Any = SimpleNamespace(
        plan=plan,
        runner=SimpleNamespace(file=file, spec=spec),
        ctx_size=64,
        tier="cuda",
        threads=1,
        config=SimpleNamespace(device="cuda", chat_template=None),
        planned=SimpleNamespace(hardware=Hardware.measure()),
        seed=None,
        warnings=(),
    )
    facts = EngineFacts.of(opened)
    assert (facts.resident_experts, facts.num_experts) == counts
    opened.plan = replace(plan, prompt_cache_bytes=7)
    assert (facts.prompt_cache_bytes, EngineFacts.of(opened).prompt_cache_bytes) == (0, 7)
    file.close()
