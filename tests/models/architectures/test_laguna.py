"""Laguna against `transformers` and llama.cpp, and what its files may say."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import (
    assert_chooses_like_llama_cpp,
    assert_gpu_equals,
    check_every_tensor_is_required,
    cpu_logits,
    gpu_logits,
    random_ids,
    set_key,
)

from builders import SMALL, TinyModel, make_model
from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.kernels.ops import RopeScaling, RopeSpec, RouterSpec
from coldstream.kernels.rope.scaling import Yarn, yarn_magnitude
from coldstream.models import ModelSpec, block_tensors, global_tensors
from coldstream.models.spec.layer_specs import AttentionSpec, DenseFfnSpec, LayerSpec, MoeSpec
from convert_hf import Variant, convert
from gguf import GGMLQuantizationType as Type
from hf_models import hf_logits, tiny_laguna
from host_device import HostDevice
from host_gpu import gpu_on
from tools import llama_cpp

hf_model = functools.cache(tiny_laguna)
GATES = ("per-head", "per-element")
VARIANTS = {
    "gates of heads": ("per-head", Variant()),
    "gates of elements": ("per-element", Variant()),
    "fused": ("per-head", Variant(fused_qkv=True, fused_experts=True)),
}
EVERY_VARIANT = pytest.mark.parametrize(("gating", "variant"), VARIANTS.values(), ids=VARIANTS)
# Of scores: the square of what YaRN multiplies queries and keys by. What becomes of that is doubled by scaled
# outputs of experts.
MAGNITUDE = 2 * yarn_magnitude(8.0) ** 2
USUAL_YARN = {"beta_fast": 32.0}
# What the model would be without one of its properties. The logits of some change by this much at least.
OTHERWISE: dict[str, dict[str, Any]] = {
    "a window of one position more": {"sliding_window": 17},
    "no windows": {"sliding_window": 4096},
    "windows at other layers": {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]},
    "no YaRN": {"scaling": {"rope_type": "default"}},
    "usual constants of YaRN": {"scaling": USUAL_YARN},
    "weights of experts that are not scaled": {"moe_routed_scaling_factor": 1.0},
}


@EVERY_VARIANT
def test_logits_equal_transformers(gating: str, variant: Variant, tmp_path: Path) -> None:
    """Over more than one chunk of positions, and many windows."""
    ids, model = random_ids(300), hf_model(gating)
    expected = hf_logits(model, ids).numpy()
    assert expected.std() > 1
    path = convert(model, tmp_path / "model.gguf", variant)
    assert np.abs(cpu_logits(path, ids, "f32") - expected).max() < 1e-4


@pytest.mark.parametrize("gating", GATES)
def test_logits_equal_llama_cpp(gating: str, tmp_path: Path) -> None:
    """Which takes the usual constants of YaRN, whatever the file says."""
    ids = random_ids(300)
    path = convert(tiny_laguna(gating, USUAL_YARN), tmp_path / "model.gguf")
    assert np.abs(cpu_logits(path, ids, "f32") - llama_cpp.logits(path, ids)).max() < 1e-4


@pytest.mark.parametrize("what", OTHERWISE)
def test_each_property_of_the_family_shows_in_its_logits(what: str) -> None:
    """So that the tests above fail without it."""
    ids = random_ids(200)
    expected, other = (hf_logits(model, ids) for model in (hf_model(), tiny_laguna(**OTHERWISE[what])))
    assert (expected - other).abs().max() > 0.1


@pytest.mark.parametrize("part", ["e_score_correction_bias", "g_proj", "shared_experts.down_proj", "q_norm"])
def test_each_part_of_the_family_shows_in_its_logits(part: str) -> None:
    ids, model = random_ids(200), tiny_laguna()
    expected = hf_logits(model, ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.fill_(1.0 if part == "q_norm" else 0.0)
    assert (expected - hf_logits(model, ids)).abs().max() > 0.1


def short_and_quantised(path: Path) -> Path:
    """A dense layer, and one with experts and a window.

    Both programs round activations in ways of their own. With the scores of a sigmoid so close to each other,
    that changes some choices of experts, and each of them changes the next layers.
    """
    model = tiny_laguna(
        scaling=USUAL_YARN,
        num_hidden_layers=2,
        num_attention_heads_per_layer=[4, 8],
        layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse"],
    )
    return convert(model, path, Variant({"": Type.Q8_0}))


@pytest.mark.sharded(of="models on the CPU")
def test_a_quantised_file_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    assert_chooses_like_llama_cpp(short_and_quantised(tmp_path / "model.gguf"))


@EVERY_VARIANT
@pytest.mark.gpu
def test_logits_of_a_gpu_equal_transformers(gating: str, variant: Variant, tmp_path: Path) -> None:
    ids, model = random_ids(300), hf_model(gating)
    path = convert(model, tmp_path / "model.gguf", variant)
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), MAGNITUDE)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.parametrize("gating", GATES)
def test_logits_of_a_gpu_on_the_host_equal_transformers(
    gating: str, compiled_for_the_host: HostDevice, tmp_path: Path
) -> None:
    ids, model = random_ids(24), hf_model(gating)
    path = convert(model, tmp_path / "model.gguf")
    with gpu_on(compiled_for_the_host):
        assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), MAGNITUDE)


@pytest.mark.gpu
def test_a_gpu_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    assert_chooses_like_llama_cpp(short_and_quantised(tmp_path / "model.gguf"), gpu_logits)


def laguna_xs() -> ModelSpec:
    """The published numbers of Laguna-XS-2.1."""
    plain = RopeSpec(64, 5e5)
    factors = Yarn(32.0, 8192, beta_fast=64.0).frequency_factors(plain)
    scaled = RopeSpec(64, 5e5, RopeScaling(factors, yarn_magnitude(32.0)))
    full = AttentionSpec(48, 8, 128, scaled, output_gate="head", qk_norm="head")
    windowed = AttentionSpec(64, 8, 128, RopeSpec(128, 1e4), output_gate="head", qk_norm="head", window=512)
    router = RouterSpec(gating="sigmoid", selection_bias=True, scale=2.5)
    moe = MoeSpec(256, 8, 512, router, shared="plain", shared_ffn_size=512)
    attentions = (full, windowed, windowed, windowed) * 10
    ffns = (DenseFfnSpec(8192), *(moe,) * 39)
    return ModelSpec(
        architecture="laguna",
        hidden_size=2048,
        vocab_size=100352,
        context_length=262144,
        rms_norm_eps=1e-6,
        tied_output=False,
        layers=tuple(LayerSpec(*parts) for parts in zip(attentions, ffns, strict=True)),
    )


def test_tensors_of_published_files() -> None:
    spec = laguna_xs()
    requirements = [*global_tensors(spec)]
    for block in range(spec.num_blocks):
        requirements += block_tensors(spec, block)
    shapes = {name: shapes[0] for first, *_ in requirements for name, shapes in first.items()}
    assert len(shapes) == 678
    assert (shapes["blk.0.attn_q.weight"], shapes["blk.1.attn_q.weight"]) == ((6144, 2048), (8192, 2048))
    assert (shapes["blk.0.attn_gate.weight"], shapes["blk.1.attn_gate.weight"]) == ((48, 2048), (64, 2048))
    assert shapes["blk.0.ffn_down.weight"] == (2048, 8192)
    assert shapes["blk.39.exp_probs_b.bias"] == (256,)
    assert shapes["blk.39.ffn_down_shexp.weight"] == (2048, 512)
    assert not any("inp_shexp" in name for name in shapes)


def published() -> TinyModel:
    """With the keys of Laguna-XS-2.1, and the tensors of a file with its numbers of rows, in few columns."""
    model = make_model("laguna", dims=SMALL, quant="F32", tokenizer=False)
    keys: dict[str, Any] = {
        "attention.head_count": [6, 8, 8, 8],
        "attention.sliding_window": 512,
        "rope.dimension_count": 4,
        "rope.dimension_count_swa": 8,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 8192,
        "rope.scaling.yarn_beta_fast": 64.0,
    }
    model.metadata |= {f"laguna.{key}": value for key, value in keys.items()}
    del model.metadata["laguna.attention.sliding_window_pattern"]  # converters do not write it
    for name, rows in {"attn_q": 48, "attn_gate": 6}.items():
        model.tensors[f"blk.0.{name}.weight"] = np.zeros((rows, 32), np.float32)
    model.tensors["blk.0.attn_output.weight"] = np.zeros((32, 48), np.float32)
    return model


def test_the_spec_of_a_file(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    """By its keys alone, but for the kind of the gate."""
    spec, expected = spec_of(published()), laguna_xs()
    assert [each.num_heads for each in spec.attentions] == [6, 8, 8, 8]
    assert [each.window for each in spec.attentions] == [None, 512, 512, 512]
    full, windowed = spec.attentions[:2]
    factors = Yarn(32.0, 8192, beta_fast=64.0).frequency_factors(RopeSpec(4, 5e5))
    assert full.rope == RopeSpec(4, 5e5, RopeScaling(factors, yarn_magnitude(32.0)))
    assert windowed.rope == RopeSpec(8, 1e4)
    assert {each.output_gate for each in spec.attentions} == {"head"}
    assert spec.moe.router == expected.moe.router
    assert (spec.moe.shared, spec.moe.shared_ffn_size) == ("plain", 64)
    assert [isinstance(layer.ffn, DenseFfnSpec) for layer in spec.layers] == [True, False, False, False]


def test_the_kind_of_a_gate_is_that_of_its_tensor(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    model = make_model("laguna", dims=SMALL, quant="F32", tokenizer=False, element_gates=True)
    assert {each.output_gate for each in spec_of(model).attentions} == {"element"}
    model.tensors["blk.1.attn_gate.weight"] = np.zeros((7, 32), np.float32)
    with pytest.raises(InconsistentError, match=r"blk\.1\.attn_gate\.weight .*\[7, 32\], expected \[8, 32\]"):
        spec_of(model)


def test_a_file_may_say_nothing_of_its_router(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    model = make_model("laguna", dims=SMALL, quant="F32", tokenizer=False)
    for name in ("expert_gating_func", "expert_weights_norm", "expert_weights_scale"):
        set_key(model, name, None)
    assert spec_of(model).moe.router == RouterSpec(gating="sigmoid", selection_bias=True)


def test_every_tensor_is_required(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    model = make_model("laguna", dims=SMALL, quant="F32", tokenizer=False)
    check_every_tensor_is_required(model, spec_of)


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("rope.freq_base_swa", None, InconsistentError, "missing"),
        ("rope.dimension_count", None, InconsistentError, "missing"),
        ("rope.scaling.yarn_attn_factor", 2.0, UnsupportedError, "2, supported: 1"),
        ("attention.sliding_window_pattern", [True, False], InconsistentError, "2 values for 4 layers"),
        ("leading_dense_block_count", 4, Exception, "4, expected 0 to 3"),
        ("expert_gating_func", 9, UnsupportedError, "9, known"),
    ],
)
def test_keys_that_are_refused(
    key: str, value: Any, kind: type, message: str, spec_of: Callable[[TinyModel], ModelSpec]
) -> None:
    model = make_model("laguna", dims=SMALL, quant="F32", tokenizer=False)
    with pytest.raises(kind, match=rf"laguna\.{key}.*{message}"):
        spec_of(set_key(model, key, value))
