"""Qwen3-MoE against `transformers` and llama.cpp, and what its files may say."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from family_cases import (
    K_TYPES,
    assert_chooses_like_llama_cpp,
    assert_gpu_equals,
    check_every_tensor_is_required,
    cpu_logits,
    gpu_logits,
    random_ids,
)

from builders import SMALL, TinyModel, make_model
from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.kernels.ops import RopeSpec
from coldstream.models import ModelSpec, block_tensors, global_tensors
from coldstream.models.spec.layer_specs import AttentionSpec, LayerSpec, MoeSpec
from convert_hf import Variant, convert
from hf_models import hf_logits, tiny_qwen3moe
from host_device import HostDevice
from host_gpu import gpu_on
from tools import llama_cpp

hf_model = functools.cache(tiny_qwen3moe)
EVERY_VARIANT = pytest.mark.parametrize(
    "variant", [Variant(), Variant(fused_qkv=True, fused_experts=True)], ids=["apart", "fused"]
)


@EVERY_VARIANT
def test_logits_equal_transformers(variant: Variant, tmp_path: Path) -> None:
    """Over more than one chunk of positions."""
    ids, model = random_ids(300), hf_model()
    expected = hf_logits(model, ids).numpy()
    assert expected.std() > 1
    path = convert(model, tmp_path / "model.gguf", variant)
    assert np.abs(cpu_logits(path, ids, "f32") - expected).max() < 1e-4


@pytest.mark.sharded(of="models on the CPU")
def test_logits_equal_llama_cpp(tmp_path: Path) -> None:
    ids = random_ids(300)
    path = convert(hf_model(), tmp_path / "model.gguf")
    assert np.abs(cpu_logits(path, ids, "f32") - llama_cpp.logits(path, ids)).max() < 1e-4


@pytest.mark.sharded(of="models on the CPU")
def test_a_quantised_file_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    path = convert(hf_model(), tmp_path / "model.gguf", Variant(K_TYPES))
    assert_chooses_like_llama_cpp(path)


@EVERY_VARIANT
@pytest.mark.gpu
def test_logits_of_a_gpu_equal_transformers(variant: Variant, tmp_path: Path) -> None:
    ids, model = random_ids(300), hf_model()
    path = convert(model, tmp_path / "model.gguf", variant)
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy())


@pytest.mark.sharded(of="models on a GPU")
def test_logits_of_a_gpu_on_the_host_equal_transformers(
    compiled_for_the_host: HostDevice, tmp_path: Path
) -> None:
    ids, model = random_ids(20), hf_model()
    path = convert(model, tmp_path / "model.gguf")
    with gpu_on(compiled_for_the_host):
        assert_gpu_equals(path, ids, hf_logits(model, ids).numpy())


@pytest.mark.gpu
def test_logits_of_a_gpu_equal_llama_cpp(tmp_path: Path) -> None:
    ids = random_ids(300)
    path = convert(hf_model(), tmp_path / "model.gguf")
    assert_gpu_equals(path, ids, llama_cpp.logits(path, ids))


@pytest.mark.gpu
def test_a_gpu_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    path = convert(hf_model(), tmp_path / "model.gguf", Variant(K_TYPES))
    assert_chooses_like_llama_cpp(path, gpu_logits)


def qwen3_30b() -> ModelSpec:
    """The published numbers of Qwen3-30B-A3B."""
    attention = AttentionSpec(32, 4, 128, RopeSpec(128, 1e6), qk_norm="head")
    return ModelSpec(
        architecture="qwen3moe",
        hidden_size=2048,
        vocab_size=151936,
        context_length=40960,
        rms_norm_eps=1e-6,
        tied_output=False,
        layers=(LayerSpec(attention, MoeSpec(128, 8, 768)),) * 48,
    )


def test_tensors_of_published_files() -> None:
    spec = qwen3_30b()
    requirements = [*global_tensors(spec)]
    for block in range(spec.num_blocks):
        requirements += block_tensors(spec, block)
    shapes = {name: shapes[0] for first, *_ in requirements for name, shapes in first.items()}
    assert len(shapes) == 579
    assert shapes["blk.47.attn_q.weight"] == (4096, 2048)
    assert shapes["blk.0.attn_k.weight"] == (512, 2048)
    assert shapes["blk.0.ffn_norm.weight"] == (2048,)
    assert shapes["blk.0.ffn_down_exps.weight"] == (128, 2048, 768)
    assert not any("shexp" in name for name in shapes)


def tiny() -> TinyModel:
    return make_model("qwen3moe", dims=SMALL, quant="F32", tokenizer=False)


def test_the_spec_of_a_file(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    """Whole heads rotate unless a key says otherwise, and a shared expert of size 0 is none."""
    spec = spec_of(tiny())
    assert spec.layer_kinds == ("attention",) * 4
    assert spec.attentions[0] == AttentionSpec(4, 2, 8, RopeSpec(8, 1e7), qk_norm="head")
    assert spec.moe == MoeSpec(4, 2, 32)
    as_coder = tiny()
    as_coder.metadata["qwen3moe.expert_shared_feed_forward_length"] = 0
    assert spec_of(as_coder) == spec
    partial = tiny()
    partial.metadata["qwen3moe.rope.dimension_count"] = 4
    assert spec_of(partial).attentions[0].rope == RopeSpec(4, 1e7)


def test_every_tensor_is_required(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    check_every_tensor_is_required(tiny(), spec_of)


def test_a_query_with_a_gate_has_another_shape(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    model = tiny()
    model.tensors["blk.1.attn_q.weight"] = np.zeros((64, 32), np.float32)
    with pytest.raises(InconsistentError, match=r"blk\.1\.attn_q\.weight"):
        spec_of(model)


@pytest.mark.parametrize("name", ["post_attention_norm.weight", "ffn_gate_shexp.weight"])
def test_tensors_of_other_families_are_refused(name: str, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    other = make_model("qwen35moe", dims=SMALL, quant="F32", tokenizer=False)
    model = tiny()
    model.tensors[f"blk.0.{name}"] = other.tensors[f"blk.0.{name}"]
    with pytest.raises(UnsupportedError, match=rf"blk\.0\.{name} .* in a qwen3moe block"):
        spec_of(model)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("norm_top_k_prob", False, "supported: normalised expert weights"),
        ("expert_weights_norm", False, "supported: normalised expert weights"),
        ("expert_gating_func", 2, r"supported: softmax \(1\)"),
        ("rope.scaling.type", "longrope", "supported"),
    ],
)
def test_what_a_file_may_not_ask_for(
    key: str, value: bool | int | str, message: str, spec_of: Callable[[TinyModel], ModelSpec]
) -> None:
    model = tiny()
    model.metadata[f"qwen3moe.{key}"] = value
    with pytest.raises(UnsupportedError, match=rf"qwen3moe\.{key}.*{message}"):
        spec_of(model)
