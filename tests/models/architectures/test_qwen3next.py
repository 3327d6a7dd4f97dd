"""Qwen3-Next against `transformers` and llama.cpp, in both layouts that converters write."""

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

from builders import SMALL, Dims, TinyModel, make_model, write_model
from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import RopeSpec
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.models import ModelSpec, block_tensors, global_tensors, read_spec
from coldstream.models.architectures.qwen3next import QWEN3NEXT
from coldstream.models.causal_lm import CausalLM
from coldstream.models.spec.layer_specs import AttentionSpec, DeltaNetSpec, LayerSpec, MoeSpec
from convert_hf import Variant, convert
from gguf import GGMLQuantizationType as Type
from hf_models import hf_logits, tiny_qwen3next
from tools import llama_cpp

hf_model = functools.cache(tiny_qwen3next)
VARIANTS = {
    "projections apart": Variant(),
    "projections by key head": Variant(ssm_in=True),
    "fused": Variant(fused_qkv=True, fused_experts=True, shared_gate_as_matrix=True),
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
BY_KEY_HEAD = pytest.mark.parametrize("ssm_in", [False, True], ids=["apart", "by key head"])


@pytest.mark.sharded(6)
@EVERY_VARIANT
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_logits_equal_transformers(ratio: int, variant: Variant, tmp_path: Path) -> None:
    """With one, two and three value heads a key head; 70 tokens are more than a chunk of the DeltaNet."""
    ids, model = random_ids(70), hf_model(ratio)
    path = convert(model, tmp_path / "model.gguf", variant)
    expected = hf_logits(model, ids).numpy()
    assert expected.std() > 1
    # Both are in float32, and a last bit of each product moves a logit by up to 1e-4.
    assert np.abs(cpu_logits(path, ids, "f32") - expected).max() < 5e-4


@pytest.mark.sharded(2)
@BY_KEY_HEAD
def test_logits_equal_llama_cpp(ssm_in: bool, tmp_path: Path) -> None:
    ids = random_ids(70)
    path = convert(hf_model(2), tmp_path / "model.gguf", Variant(ssm_in=ssm_in))
    assert np.abs(cpu_logits(path, ids, "f32") - llama_cpp.logits(path, ids)).max() < 1e-4


@pytest.mark.sharded(2)
@BY_KEY_HEAD
def test_a_quantised_file_chooses_the_tokens_that_llama_cpp_chooses(ssm_in: bool, tmp_path: Path) -> None:
    """A wrong order of rows or of heads leaves a fifth of the choices alike."""
    path = convert(hf_model(2), tmp_path / "model.gguf", Variant(K_TYPES, ssm_in=ssm_in))
    assert_chooses_like_llama_cpp(path)


@EVERY_VARIANT
@pytest.mark.gpu
def test_logits_of_a_gpu_equal_transformers(variant: Variant, tmp_path: Path) -> None:
    ids, model = random_ids(70), hf_model(2)
    path = convert(model, tmp_path / "model.gguf", variant)
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy())


@BY_KEY_HEAD
@pytest.mark.gpu
def test_logits_of_a_gpu_equal_llama_cpp(ssm_in: bool, tmp_path: Path) -> None:
    ids = random_ids(70)
    path = convert(hf_model(2), tmp_path / "model.gguf", Variant(ssm_in=ssm_in))
    assert_gpu_equals(path, ids, llama_cpp.logits(path, ids))


@BY_KEY_HEAD
@pytest.mark.gpu
def test_a_gpu_chooses_the_tokens_that_llama_cpp_chooses(ssm_in: bool, tmp_path: Path) -> None:
    path = convert(hf_model(2), tmp_path / "model.gguf", Variant(K_TYPES, ssm_in=ssm_in))
    assert_chooses_like_llama_cpp(path, gpu_logits)


@pytest.mark.sharded
@pytest.mark.parametrize("quant_type", [Type.Q4_K, Type.Q8_0, Type.BF16], ids=lambda kind: kind.name)
def test_both_layouts_are_the_same_model_to_the_bit(quant_type: Type, tmp_path: Path) -> None:
    """Rows are copied whole, so gathering them rounds nothing."""
    ids = random_ids(20)
    types = {"ssm_ba": Type.Q8_0, "": quant_type}
    apart = convert(hf_model(2), tmp_path / "apart.gguf", Variant(types))
    by_key_head = convert(hf_model(2), tmp_path / "by_key_head.gguf", Variant(types, ssm_in=True))
    np.testing.assert_array_equal(cpu_logits(apart, ids), cpu_logits(by_key_head, ids))


def test_rows_of_every_part() -> None:
    """Two key heads of two channels with two value heads each, written out."""
    spec = DeltaNetSpec(
        conv_kernel=4, state_size=2, num_key_heads=2, num_value_heads=4, value_heads_grouped=True
    )
    ffn = MoeSpec(num_experts=1, num_experts_per_tok=1, ffn_size=1)
    gathered = QWEN3NEXT.gathered(LayerSpec(spec, ffn))
    assert gathered["ssm_beta"].row_ids == (0, 1, 4, 5)
    assert gathered["ssm_alpha"].row_ids == (2, 3, 6, 7)
    queries, keys, values = (0, 1, 12, 13), (2, 3, 14, 15), (4, 5, 6, 7, 16, 17, 18, 19)
    assert gathered["attn_qkv"].row_ids == queries + keys + values
    assert gathered["attn_gate"].row_ids == (8, 9, 10, 11, 20, 21, 22, 23)
    assert {rows.source for rows in gathered.values()} == {"ssm_in", "ssm_ba"}


def tiny(**options: bool) -> TinyModel:
    return make_model("qwen3next", dims=SMALL, quant="F32", tokenizer=False, **options)


def qwen3next_80b() -> ModelSpec:
    """The published numbers of Qwen3-Next-80B-A3B."""
    attention = AttentionSpec(16, 2, 256, RopeSpec(64, 1e7), output_gate="query", qk_norm="head")
    delta_net = DeltaNetSpec(4, 128, 16, 32, value_heads_grouped=True)
    ffn = MoeSpec(512, 10, 512, shared="gated", shared_ffn_size=512)
    return ModelSpec(
        architecture="qwen3next",
        hidden_size=2048,
        vocab_size=151936,
        context_length=262144,
        rms_norm_eps=1e-6,
        tied_output=False,
        layers=(*[LayerSpec(delta_net, ffn)] * 3, LayerSpec(attention, ffn)) * 12,
    )


@pytest.mark.parametrize(("by_key_head", "num_tensors"), [(False, 843), (True, 807)])
def test_tensors_of_published_files(by_key_head: bool, num_tensors: int) -> None:
    spec = qwen3next_80b()
    requirements = [*global_tensors(spec)]
    for block in range(spec.num_blocks):
        requirements += block_tensors(spec, block)
    shapes: dict[str, tuple[int, ...]] = {}
    for first, *others in requirements:
        is_delta_net = any(name.endswith("attn_gate.weight") for name in first)
        group = others[0] if by_key_head and is_delta_net else first
        shapes |= {name: expected[0] for name, expected in group.items()}
    assert len(shapes) == num_tensors
    assert shapes["blk.0.ssm_ba.weight"] == (64, 2048)
    if by_key_head:
        assert shapes["blk.0.ssm_in.weight"] == (12288, 2048)
    else:
        assert shapes["blk.0.attn_qkv.weight"] == (8192, 2048)
        assert shapes["blk.0.attn_gate.weight"] == (4096, 2048)


@BY_KEY_HEAD
def test_the_spec_of_a_file(ssm_in: bool, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    """Also of a file without any key that tells the kinds of layers, and with an MTP block."""
    spec = spec_of(tiny(ssm_in=ssm_in))
    assert spec.architecture == "qwen3next"
    assert spec.layer_kinds == ("delta_net", "delta_net", "delta_net", "attention")
    assert spec.delta_net.key_head_ids == (0, 0, 1, 1)
    assert (spec.attentions[0].output_gate, spec.moe.shared, spec.moe.shared_ffn_size) == (
        "query",
        "gated",
        64,
    )
    silent = tiny(ssm_in=ssm_in)
    del silent.metadata["qwen3next.full_attention_interval"]
    assert spec_of(silent) == spec
    assert spec_of(tiny(ssm_in=ssm_in, nextn=True)).num_nextn_layers == 1


@pytest.mark.sharded(of="models on the CPU")
@BY_KEY_HEAD
def test_every_tensor_is_required(ssm_in: bool, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    check_every_tensor_is_required(tiny(ssm_in=ssm_in), spec_of)


def test_both_layouts_at_once(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    model = tiny()
    model.tensors["blk.1.ssm_in.weight"] = tiny(ssm_in=True).tensors["blk.1.ssm_in.weight"]
    with pytest.raises(InconsistentError, match=r"both blk\.1\.attn_qkv\.weight and blk\.1\.ssm_in\.weight"):
        spec_of(model)


def test_tensors_of_qwen35_are_none_of_this_family(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    other = make_model("qwen35moe", dims=SMALL, quant="F32", tokenizer=False)
    model = tiny()
    model.tensors["blk.0.ssm_beta.weight"] = other.tensors["blk.0.ssm_beta.weight"]
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ssm_beta\.weight .* in a qwen3next block"):
        spec_of(model)


@BY_KEY_HEAD
def test_gathered_matrices_hold_the_values_of_their_rows(ssm_in: bool, tmp_path: Path) -> None:
    model = make_model("qwen3next", dims=Dims(), quant="F32", ssm_in=ssm_in, tokenizer=True)
    with GGUFFile.open(write_model(tmp_path / "tiny.gguf", model)[0]) as file:
        loaded = CausalLM.load(file, read_spec(file.metadata, file.tensors), ReferenceOps())
    mixer = loaded.blocks[0].mixer
    per_head = model.tensors["blk.0.ssm_ba.weight"].reshape(2, 2, 2, -1)  # key head, beta or alpha, row
    np.testing.assert_array_equal(mixer.ssm_beta, per_head[:, 0].reshape(4, -1))
    np.testing.assert_array_equal(mixer.ssm_alpha, per_head[:, 1].reshape(4, -1))
