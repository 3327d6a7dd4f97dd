"""gpt-oss against `transformers` and llama.cpp, and what its files may say."""

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

from builders import TinyModel, read_model
from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.kernels.ops import Activation, RopeScaling, RopeSpec, RouterSpec
from coldstream.kernels.rope.scaling import Yarn, yarn_magnitude
from coldstream.models import ModelSpec, block_tensors, global_tensors
from coldstream.models.architectures import gpt_oss
from coldstream.models.spec.layer_specs import AttentionSpec, LayerSpec, MoeSpec
from coldstream.models.spec.rope_keys import YarnRules
from convert_hf import Variant, convert
from gguf import GGMLQuantizationType as Type
from hf_models import hf_logits, tiny_gpt_oss
from host_device import HostDevice
from host_gpu import gpu_on
from tools import llama_cpp

hf_model = functools.cache(tiny_gpt_oss)
ROUNDED = {"truncate": True}
# Of scores: what YaRN multiplies queries and keys by, and what they are longer than normed ones.
MAGNITUDE = 3 * yarn_magnitude(8.0) ** 2
# What the model would be without one of its properties. The logits of some change by this much at least.
OTHERWISE: dict[str, dict[str, Any]] = {
    "a window of one position more": {"sliding_window": 17},
    "no windows": {"sliding_window": 4096},
    "windows at other layers": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "no YaRN": {"scaling": {"rope_type": "default"}},
    "whole dimensions of YaRN": {"scaling": ROUNDED},
    "a lower limit of the unit": {"swiglu_limit": 1.0},
    "another steepness of the unit": {"swiglu_alpha": 1.0},
}
# As published: experts in MXFP4, other matrices in Q8_0.
PUBLISHED_TYPES = {"": Type.Q8_0} | dict.fromkeys(
    ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), Type.MXFP4
)


@pytest.fixture
def yarn_of_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose YaRN blends from one whole dimension to another."""
    monkeypatch.setattr(gpt_oss, "YARN", YarnRules())


def test_logits_equal_transformers(tmp_path: Path) -> None:
    """Over more than one chunk of positions, and many windows."""
    ids, model = random_ids(300), hf_model()
    expected = hf_logits(model, ids).numpy()
    assert expected.std() > 1
    path = convert(model, tmp_path / "model.gguf")
    assert np.abs(cpu_logits(path, ids, "f32") - expected).max() < 1e-4


@pytest.mark.usefixtures("yarn_of_llama_cpp")
def test_logits_equal_llama_cpp(tmp_path: Path) -> None:
    ids = random_ids(300)
    path = convert(tiny_gpt_oss(ROUNDED), tmp_path / "model.gguf")
    assert np.abs(cpu_logits(path, ids, "f32") - llama_cpp.logits(path, ids)).max() < 3e-4


@pytest.mark.parametrize("what", OTHERWISE)
def test_each_property_of_the_family_shows_in_its_logits(what: str) -> None:
    """So that the tests above fail without it."""
    ids = random_ids(200)
    expected, other = (hf_logits(model, ids) for model in (hf_model(), tiny_gpt_oss(**OTHERWISE[what])))
    assert (expected - other).abs().max() > 0.1


@pytest.mark.parametrize(
    "part",
    ["sinks", "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "router.bias", "gate_up_proj_bias",
     "down_proj_bias"],
)  # fmt: skip
def test_each_part_of_the_family_shows_in_its_logits(part: str) -> None:
    """A bias of keys shows by its rotation alone: without one it would move all scores of a row alike."""
    ids, model = random_ids(200), tiny_gpt_oss()
    expected = hf_logits(model, ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.fill_(-1e4 if part == "sinks" else 0.0)
    assert (expected - hf_logits(model, ids)).abs().max() > 0.1


def short_and_quantised(path: Path) -> Path:
    """A layer with a window and one without, in the types of published files."""
    return convert(tiny_gpt_oss(ROUNDED, num_hidden_layers=2), path, Variant(PUBLISHED_TYPES))


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.usefixtures("yarn_of_llama_cpp")
def test_a_quantised_file_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    assert_chooses_like_llama_cpp(short_and_quantised(tmp_path / "model.gguf"))


@pytest.mark.gpu
def test_logits_of_a_gpu_equal_transformers(tmp_path: Path) -> None:
    ids, model = random_ids(300), hf_model()
    path = convert(model, tmp_path / "model.gguf")
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), MAGNITUDE)


@pytest.mark.sharded(of="models on a GPU")
def test_logits_of_a_gpu_on_the_host_equal_transformers(
    compiled_for_the_host: HostDevice, tmp_path: Path
) -> None:
    ids, model = random_ids(24), hf_model()
    path = convert(model, tmp_path / "model.gguf")
    with gpu_on(compiled_for_the_host):
        assert_gpu_equals(path, ids, hf_logits(model, ids).numpy(), MAGNITUDE)


@pytest.mark.gpu
@pytest.mark.usefixtures("yarn_of_llama_cpp")
def test_a_gpu_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    assert_chooses_like_llama_cpp(short_and_quantised(tmp_path / "model.gguf"), gpu_logits)


def gpt_oss_20b() -> ModelSpec:
    """The published numbers of gpt-oss-20b."""
    plain = RopeSpec(64, 150000.0)
    factors = Yarn(32.0, 4096, truncate=False).frequency_factors(plain)
    rope = RopeSpec(64, 150000.0, RopeScaling(factors, yarn_magnitude(32.0)))
    windowed = AttentionSpec(64, 8, 64, rope, bias="all", sinks=True, window=128)
    full = AttentionSpec(64, 8, 64, rope, bias="all", sinks=True)
    router = RouterSpec(gating="softmax of the chosen", bias=True)
    moe = MoeSpec(32, 4, 2880, router, activation=Activation("clamped swiglu", 7.0), bias=True)
    return ModelSpec(
        architecture="gpt-oss",
        hidden_size=2880,
        vocab_size=201088,
        context_length=131072,
        rms_norm_eps=1e-5,
        tied_output=False,
        layers=tuple(LayerSpec(attention, moe) for attention in (windowed, full) * 12),
    )


def test_tensors_of_published_files() -> None:
    spec = gpt_oss_20b()
    requirements = [*global_tensors(spec)]
    for block in range(spec.num_blocks):
        requirements += block_tensors(spec, block)
    shapes = {name: shapes[0] for first, *_ in requirements for name, shapes in first.items()}
    assert len(shapes) == 72 + 98 + 289  # in MXFP4, Q8_0 and F32
    assert shapes["blk.0.attn_sinks.weight"] == (64,)
    assert shapes["blk.23.ffn_down_exps.bias"] == (32, 2880)


@pytest.fixture
def model(tmp_path: Path) -> TinyModel:
    """A file of this family, which may be changed."""
    return read_model(convert(hf_model(), tmp_path / "read.gguf"))


def test_the_spec_of_a_file(model: TinyModel, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    """By its keys alone."""
    spec, expected = spec_of(model), gpt_oss_20b()
    assert [each.window for each in spec.attentions] == [16, None, 16, None]
    factors = Yarn(8.0, 1024, truncate=False).frequency_factors(RopeSpec(64, 150000.0))
    rope = RopeSpec(64, 150000.0, RopeScaling(factors, yarn_magnitude(8.0)))
    assert {each.rope for each in spec.attentions} == {rope}
    assert {(each.bias, each.sinks, each.qk_norm) for each in spec.attentions} == {("all", True, "none")}
    assert spec.moe.router == expected.moe.router
    assert (spec.moe.activation, spec.moe.bias) == (expected.moe.activation, True)


def test_every_tensor_is_required(model: TinyModel, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    check_every_tensor_is_required(model, spec_of)


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("rope.freq_base", None, InconsistentError, "missing"),
        ("attention.sliding_window", None, InconsistentError, "missing, expected an integer: the file is"),
        ("attention.sliding_window", 0, InconsistentError, "0, expected 1 to"),
        ("expert_gating_func", 2, UnsupportedError, "2"),
        ("expert_weights_scale", 2.5, UnsupportedError, "2.5"),
        ("rope.freq_base_swa", 1e4, UnsupportedError, "one rotary embedding"),
        ("rope.scaling.yarn_attn_factor", 2.0, UnsupportedError, "2, supported: 1"),
        ("attention.sliding_window_pattern", [True, False], InconsistentError, "2 values for 4 layers"),
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
