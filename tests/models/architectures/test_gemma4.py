"""gemma-4 with experts against `transformers` and llama.cpp, and what its files may say."""

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
from transformers import PreTrainedModel

from builders import TinyModel, read_model, write_model
from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.kernels.ops import Activation, RopeSpec, RouterSpec
from coldstream.models import ModelSpec, block_tensors, global_tensors
from coldstream.models.spec.layer_specs import AttentionSpec, LayerSpec, MoeSpec
from convert_hf import Variant, convert
from gguf import GGMLQuantizationType as Type
from hf_models import hf_logits, tiny_gemma4
from host_device import HostDevice
from host_gpu import gpu_on
from tools import llama_cpp

hf_model = functools.cache(tiny_gemma4)
# What the model would be without one of its properties.
OTHERWISE: dict[str, dict[str, Any]] = {
    "a window of one position more": {"sliding_window": 17},
    "no windows": {"sliding_window": 4096},
    "no cap": {"final_logit_softcapping": None},
    "another unit": {"hidden_activation": "silu"},
    "pairs that all turn": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
}
# Of scores, which nothing divides by the heads' length: what they are in these models, and of heads of 512,
# which are twice as long as those of 128.
UNDIVIDED, LONGER = 2, 2
NORMS = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "post_feedforward_layernorm",
    "self_attn.v_norm",
)
# As published: routed experts in Q5_K and Q5_1, other matrices in Q8_0.
PUBLISHED_TYPES = {
    "": Type.Q8_0,
    "ffn_gate_exps": Type.Q5_K,
    "ffn_up_exps": Type.Q5_K,
    "ffn_down_exps": Type.Q5_1,
}


def test_logits_equal_transformers(tmp_path: Path) -> None:
    """Over more than one chunk of positions, and many windows."""
    ids, model = random_ids(300), hf_model()
    expected = hf_logits(model, ids).numpy()
    assert expected.std() > 1
    path = convert(model, tmp_path / "model.gguf")
    assert np.abs(cpu_logits(path, ids, "f32") - expected).max() < 1e-4


def test_logits_equal_llama_cpp(tmp_path: Path) -> None:
    """Whose GELU is a table of 16-bit floats."""
    ids = random_ids(300)
    path = convert(hf_model(), tmp_path / "model.gguf")
    assert np.abs(cpu_logits(path, ids, "f32") - llama_cpp.logits(path, ids)).max() < 4e-3


@pytest.mark.parametrize("what", OTHERWISE)
def test_each_property_of_the_family_shows_in_its_logits(what: str) -> None:
    """So that the tests above fail without it."""
    ids = random_ids(200)
    expected, other = (hf_logits(model, ids) for model in (hf_model(), tiny_gemma4(**OTHERWISE[what])))
    assert (expected - other).abs().max() > 0.1


@pytest.mark.parametrize("norm", NORMS)
def test_each_norm_shows_in_the_logits(norm: str) -> None:
    check_changed(lambda layer: layer.set_submodule(norm, torch.nn.Identity()))


@pytest.mark.parametrize(
    "part",
    [
        *(f"{norm}.weight" for norm in NORMS[:-1]),
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "router.scale",
        "router.per_expert_scale",
        "layer_scalar",
    ],
)
def test_each_vector_shows_in_the_logits(part: str) -> None:
    def fill(layer: torch.nn.Module) -> None:
        *path, name = part.split(".")
        vector = getattr(layer.get_submodule(".".join(path)), name)
        vector.data.fill_(float(vector.mean()))
        if part == "layer_scalar":
            vector.fill_(1.0)

    check_changed(fill)


def check_changed(change: Callable[[torch.nn.Module], None]) -> None:
    """The logits are others after a change of each layer."""
    ids, model = random_ids(200), tiny_gemma4()
    expected = hf_logits(model, ids)
    with torch.no_grad():
        for layer in model.model.layers:
            change(layer)
    assert (expected - hf_logits(model, ids)).abs().max() > 0.1


def short_and_quantised(path: Path) -> Path:
    """A layer with a window and one without, in the types of published files."""
    short = tiny_gemma4(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    return convert(short, path, Variant(PUBLISHED_TYPES))


@pytest.mark.sharded(of="models on the CPU")
def test_a_quantised_file_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    assert_chooses_like_llama_cpp(short_and_quantised(tmp_path / "model.gguf"))


@pytest.mark.gpu
def test_logits_of_a_gpu_equal_transformers(tmp_path: Path) -> None:
    ids, model = random_ids(300), hf_model()
    path = convert(model, tmp_path / "model.gguf")
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), UNDIVIDED)


@pytest.mark.sharded(of="models on a GPU")
def test_logits_of_a_gpu_on_the_host_equal_transformers(
    compiled_for_the_host: HostDevice, tmp_path: Path
) -> None:
    ids, model = random_ids(24), hf_model()
    path = convert(model, tmp_path / "model.gguf")
    with gpu_on(compiled_for_the_host):
        assert_gpu_equals(path, ids, hf_logits(model, ids).numpy())


def largest_heads() -> PreTrainedModel:
    """Two layers with heads as large as published."""
    return tiny_gemma4(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
    )


@pytest.mark.gpu
def test_the_largest_heads_on_a_gpu(tmp_path: Path) -> None:
    ids, model = random_ids(300), largest_heads()
    path = convert(model, tmp_path / "model.gguf")
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), UNDIVIDED * LONGER)


@pytest.mark.sharded(of="models on a GPU")
def test_the_largest_heads_on_a_gpu_of_the_host(compiled_for_the_host: HostDevice, tmp_path: Path) -> None:
    ids, model = random_ids(24), largest_heads()
    path = convert(model, tmp_path / "model.gguf")
    with gpu_on(compiled_for_the_host):
        assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), LONGER)


@pytest.mark.gpu
def test_a_gpu_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    assert_chooses_like_llama_cpp(short_and_quantised(tmp_path / "model.gguf"), gpu_logits)


def gemma4_26b() -> ModelSpec:
    """The published numbers of gemma-4-26B-A4B."""
    windowed = AttentionSpec(
        16, 8, 256, RopeSpec(256, 1e4), qk_norm="head", v_norm=True, scale=1.0, window=1024
    )
    full = AttentionSpec(
        16, 2, 512, RopeSpec(512, 1e6), rope_factors=True, qk_norm="head", v_norm=True, scale=1.0,
        values_are_keys=True,
    )  # fmt: skip
    router = RouterSpec(own_input=True, expert_scale=True)
    moe = MoeSpec(
        128, 8, 704, router, activation=Activation("geglu"), shared="parallel", shared_ffn_size=2112
    )
    pattern = (windowed,) * 5 + (full,)
    return ModelSpec(
        architecture="gemma4",
        hidden_size=2816,
        vocab_size=262144,
        context_length=262144,
        rms_norm_eps=1e-6,
        tied_output=True,
        layers=tuple(
            LayerSpec(attention, moe, post_norms=True, output_scale=True) for attention in pattern * 5
        ),
        embedding_scale=2816**0.5,
        logit_softcap=30.0,
    )


def test_tensors_of_published_files() -> None:
    spec = gemma4_26b()
    requirements = [*global_tensors(spec)]
    for block in range(spec.num_blocks):
        requirements += block_tensors(spec, block)
    shapes = {name: shapes[0] for first, *_ in requirements for name, shapes in first.items()}
    assert shapes["rope_freqs.weight"] == (256,)
    assert shapes["blk.0.attn_q.weight"] == (4096, 2816)
    assert shapes["blk.5.attn_q.weight"] == (8192, 2816)
    assert shapes["blk.5.attn_k.weight"] == (1024, 2816)
    assert "blk.5.attn_v.weight" not in shapes
    assert shapes["blk.29.ffn_gate.weight"] == (2112, 2816)
    assert shapes["blk.29.layer_output_scale.weight"] == (1,)


@pytest.fixture
def model(tmp_path: Path) -> TinyModel:
    """A file of this family, which may be changed."""
    return read_model(convert(hf_model(), tmp_path / "read.gguf"))


def test_the_spec_of_a_file(model: TinyModel, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    """By its keys and its tensors."""
    spec, expected = spec_of(model), gemma4_26b()
    assert [each.window for each in spec.attentions] == [16, None, 16, None]
    assert spec.kv_heads == ((2, 64), (1, 128), (2, 64), (1, 128))
    assert [each.values_are_keys for each in spec.attentions] == [False, True, False, True]
    assert [each.rope for each in spec.attentions[:2]] == [RopeSpec(64, 1e4), RopeSpec(128, 1e6)]
    assert [each.rope_factors for each in spec.attentions[:2]] == [False, True]
    assert {(each.scale, each.v_norm, each.qk_norm) for each in spec.attentions} == {(1.0, True, "head")}
    assert (spec.moe.router, spec.moe.activation) == (expected.moe.router, expected.moe.activation)
    assert (spec.moe.shared, spec.moe.shared_ffn_size) == ("parallel", 512)
    assert (spec.embedding_scale, spec.logit_softcap, spec.tied_output) == (16.0, 4.0, True)
    assert all(layer.post_norms and layer.output_scale for layer in spec.layers)


def test_what_files_may_lack(model: TinyModel, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    """Numbers of layers, scales of experts, and the cap."""
    del model.metadata["gemma4.final_logit_softcapping"]
    for name in list(model.tensors):
        if name.endswith(("layer_output_scale.weight", "ffn_down_exps.scale")):
            del model.tensors[name]
    spec = spec_of(model)
    assert spec.logit_softcap == 0
    assert not any(layer.output_scale for layer in spec.layers)
    assert not spec.moe.router.expert_scale


def test_logits_without_numbers_of_layers(model: TinyModel, tmp_path: Path) -> None:
    """They are those of layers whose number is 1, without a cap."""
    ids, plain = random_ids(40), tiny_gemma4(final_logit_softcapping=None)
    for layer in plain.model.layers:
        layer.layer_scalar.fill_(1.0)
    del model.metadata["gemma4.final_logit_softcapping"]
    for block in range(4):
        del model.tensors[f"blk.{block}.layer_output_scale.weight"]
    (path,) = write_model(tmp_path / "model.gguf", model)
    assert np.abs(cpu_logits(path, ids, "f32") - hf_logits(plain, ids).numpy()).max() < 1e-4


def test_blocks_that_draft_are_refused(model: TinyModel, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    model.tensors["blk.3.nextn.eh_proj.weight"] = np.ones((256, 512), np.float32)
    with pytest.raises(UnsupportedError, match="1 blocks for multi-token prediction, supported: none"):
        spec_of(model)


def test_layers_without_a_window_may_project_values(model: TinyModel, tmp_path: Path) -> None:
    """The logits are the same where values are projected as keys are, and others where they are not."""
    ids, name = random_ids(20), "blk.1.attn_{}.weight"
    expected = cpu_logits(write_model(tmp_path / "keys.gguf", model)[0], ids)
    for factor in (1, -1):
        model.tensors[name.format("v")] = factor * model.tensors[name.format("k")]
        found = cpu_logits(write_model(tmp_path / "values.gguf", model)[0], ids)
        assert np.array_equal(found, expected) == (factor == 1)


def test_gates_and_ups_of_experts_may_be_one_tensor(model: TinyModel, tmp_path: Path) -> None:
    """As in published files."""
    ids = random_ids(20)
    expected = cpu_logits(write_model(tmp_path / "apart.gguf", model)[0], ids)
    for block in range(4):
        apart = [model.tensors.pop(f"blk.{block}.ffn_{name}_exps.weight") for name in ("gate", "up")]
        model.tensors[f"blk.{block}.ffn_gate_up_exps.weight"] = np.concatenate(apart, axis=1)
    found = cpu_logits(write_model(tmp_path / "together.gguf", model)[0], ids)
    assert np.array_equal(found, expected)


def test_every_tensor_is_required(model: TinyModel, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    """Of a layer with a window also the projection of values, and numbers that other layers have."""
    check_every_tensor_is_required(model, spec_of)


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_factors_of_frequencies_are_positive(model: TinyModel, tmp_path: Path, factor: float) -> None:
    model.tensors["rope_freqs.weight"][3] = factor
    (path,) = write_model(tmp_path / "model.gguf", model)
    with pytest.raises(InconsistentError, match="rope_freqs"):
        cpu_logits(path, [1])


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("rope.freq_base", None, InconsistentError, "missing"),
        ("rope.freq_base_swa", None, InconsistentError, "missing"),
        ("attention.key_length_swa", None, InconsistentError, "missing"),
        ("attention.value_length_swa", 32, InconsistentError, "32, the keys have 64"),
        ("attention.sliding_window", None, InconsistentError, "missing"),
        ("attention.sliding_window_pattern", None, UnsupportedError, "the layers that"),
        ("expert_count", None, UnsupportedError, "models without experts"),
        ("expert_gating_func", 2, UnsupportedError, "2"),
        ("expert_weights_scale", 2.5, UnsupportedError, "2.5"),
        ("embedding_length_per_layer_input", 256, UnsupportedError, "256, supported: no embeddings"),
        ("attention.shared_kv_layers", 2, UnsupportedError, "2, supported: keys and values of each layer"),
        ("final_logit_softcapping", -1.0, InconsistentError, "-1"),
        ("rope.scaling.factor", 8.0, UnsupportedError, "8.0, supported: frequencies by the tensor"),
        ("rope.scale_linear", 4.0, UnsupportedError, "scale_linear.*4.0, supported: frequencies"),
        ("attention.causal", False, UnsupportedError, "causal"),
    ],
)
def test_what_a_key_says_is_computed_or_refused(
    model: TinyModel,
    spec_of: Callable[[TinyModel], ModelSpec],
    key: str,
    value: object,
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        spec_of(set_key(model, key, value))
