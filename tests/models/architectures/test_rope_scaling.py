"""Rotary embeddings that are stretched, linearly and by YaRN, against `transformers` and llama.cpp."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import assert_gpu_equals, cpu_logits, random_ids
from transformers import PreTrainedModel

from convert_hf import convert
from hf_models import hf_logits, tiny_model, tiny_qwen3moe
from host_device import HostDevice
from host_gpu import gpu_on
from tools import llama_cpp

# An original context so short that texts go beyond it, and that some frequencies are kept, some blended, some
# divided.
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
# Of scores: the square of what YaRN multiplies queries and keys by, 0.1 ln(factor) + 1.
MAGNITUDES = {"linear": 1.0, "yarn": (0.1 * math.log(4.0) + 1) ** 2}
EVERY_SCALING = pytest.mark.parametrize("kind", SCALINGS)
EVERY_ARCHITECTURE = pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])


@functools.cache
def hf_model(arch: str, kind: str) -> PreTrainedModel:
    if arch == "qwen3moe":
        return tiny_qwen3moe(SCALINGS.get(kind))
    return tiny_model(moe=True, value_heads_per_key_head=2, scaling=SCALINGS.get(kind))


@EVERY_SCALING
@EVERY_ARCHITECTURE
def test_logits_equal_transformers_and_llama_cpp(arch: str, kind: str, tmp_path: Path) -> None:
    ids, model = random_ids(300), hf_model(arch, kind)
    path = convert(model, tmp_path / "model.gguf")
    found, expected = cpu_logits(path, ids, "f32"), hf_logits(model, ids).numpy()
    assert np.abs(found - expected).max() < 3e-4
    assert np.abs(found - llama_cpp.logits(path, ids)).max() < 3e-4
    plain = convert(hf_model(arch, "none"), tmp_path / "plain.gguf")
    assert np.abs(cpu_logits(plain, ids, "f32") - found).max() > 0.1


@pytest.mark.sharded(2)
@EVERY_SCALING
def test_logits_of_a_gpu_on_the_host_equal_transformers(
    kind: str, compiled_for_the_host: HostDevice, tmp_path: Path
) -> None:
    ids, model = random_ids(20), hf_model("qwen3moe", kind)
    path = convert(model, tmp_path / "model.gguf")
    with gpu_on(compiled_for_the_host):
        assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), MAGNITUDES[kind])


@pytest.mark.gpu
@EVERY_SCALING
@EVERY_ARCHITECTURE
def test_logits_of_a_gpu_equal_transformers(arch: str, kind: str, tmp_path: Path) -> None:
    ids, model = random_ids(300), hf_model(arch, kind)
    path = convert(model, tmp_path / "model.gguf")
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), MAGNITUDES[kind])
