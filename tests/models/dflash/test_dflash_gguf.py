"""Drafters' GGUF metadata in both conventions, and what must not be in it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import make_model, write_model
from coldstream.errors import InconsistentError, LimitError, ModelFormatError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.rope.scaling import yarn_magnitude
from coldstream.models.dflash.metadata import ARCHITECTURES, OTHER_DRAFTERS, metadata_of, spec_of_metadata
from coldstream.models.dflash.spec import DflashLayer, DflashRope, DflashSpec
from dflash_cases import CASES, MIXED, as_in_gguf, config, spec_of, write_gguf_drafter

OLDER = "qwen35-dflash-draft"


def read(
    folder: Path, spec: DflashSpec, architecture: str = "dflash", changes: dict[str, Any] | None = None
) -> DflashSpec:
    """The spec in a file without tensors."""
    path = write_gguf_drafter(folder / "drafter.gguf", spec, {}, architecture, changes=changes)
    with GGUFFile.open(path) as file:
        return spec_of_metadata(file.metadata)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_trap_capture_plus_one_all_conventions_give_the_spec_of_the_configuration(
    tmp_path: Path, name: str, architecture: str
) -> None:
    """Mainline's layers are one more than Hugging Face's, the older ones the same. No key tells biases."""
    spec = spec_of(CASES[name])
    assert read(tmp_path, spec, architecture) == replace(as_in_gguf(spec), has_attention_bias=False)


def test_a_cap_of_logits_is_kept_in_both_kinds_of_files(tmp_path: Path) -> None:
    """As drafters of Gemma 4 state it, at the top or in their section."""
    values = config(final_logit_softcapping=30)
    spec = spec_of(values)
    assert spec.logit_softcap == 30.0
    assert read(tmp_path, spec, changes={"dflash.final_logit_softcapping": 30.0}) == as_in_gguf(spec)
    assert metadata_of(spec)["dflash.final_logit_softcapping"] == 30.0
    del values["final_logit_softcapping"]
    values["dflash_config"] = values["dflash_config"] | {"final_logit_softcapping": 30.0}
    assert spec_of(values) == spec
    assert read(tmp_path, spec_of(config())).logit_softcap == 0.0


def test_causality_that_is_not_said_follows_the_windows(tmp_path: Path) -> None:
    spec = spec_of(config(**MIXED))
    assert read(tmp_path, spec).layers == (DflashLayer(9, True),) * 2 + (DflashLayer(None, False),)
    said = read(tmp_path, spec, changes={"dflash.attention.causal": False})
    assert said.layers == (DflashLayer(9, False),) * 2 + (DflashLayer(None, False),)


def test_keys_that_other_converters_write(tmp_path: Path) -> None:
    spec = spec_of(config(rope_scaling={"rope_type": "yarn", "factor": 8.0, **ORIGINAL}))
    tokens = [f"t{i}" for i in range(spec.vocab_size)]
    changes = {
        "dflash.vocab_size": None,
        "tokenizer.ggml.tokens": tokens,
        "dflash.attention.sliding_window": 0,
        "dflash.rope.dimension_count": 32,
        "dflash.rope.dimension_sections": [16, 0, 0, 0],
        "dflash.rope.scaling.attn_factor": 0.5,
        "dflash.rope.scaling.yarn_ext_factor": 1.0,
        "dflash.logit_scale": 1.0,
        "dflash.final_logit_softcapping": 0.0,
    }
    found = read(tmp_path, spec, changes=changes)
    assert found.rope.magnitude == 0.5 * yarn_magnitude(8.0)
    assert found.vocab_size == 50


@pytest.mark.parametrize("kind", [{}, {"dflash.rope.scaling.type": "linear"}])
def test_a_factor_without_a_type_is_linear(tmp_path: Path, kind: dict[str, Any]) -> None:
    found = read(tmp_path, spec_of(config()), changes={"dflash.rope.scaling.factor": 4.0, **kind})
    assert found.rope == DflashRope(found.rope.theta, divisor=4.0)
    plain = DflashRope(found.rope.theta).inverse_frequencies(found.head_dim)
    assert np.array_equal(found.rope.inverse_frequencies(found.head_dim), plain / 4)
    none = {"dflash.rope.scaling.factor": 4.0, "dflash.rope.scaling.type": "none"}
    assert read(tmp_path, spec_of(config()), changes=none).rope == DflashRope(found.rope.theta)


ORIGINAL = {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize(("value", "expected"), [(3, None), (40, 40), (8, 8)])
def test_older_files_say_the_number_of_auxiliary_layers_or_of_the_targets_layers(
    tmp_path: Path, value: int, expected: int | None
) -> None:
    spec = spec_of(config())
    found = read(tmp_path, spec, OLDER, {f"{OLDER}.dflash.n_target_layers": value})
    assert found.num_target_layers == expected


BROKEN: dict[str, tuple[type[ModelFormatError], str, dict[str, Any]]] = {
    "no layers": (InconsistentError, "dflash.target_layers: missing", {"target_layers": None}),
    "layer 0": (InconsistentError, "target_layers", {"target_layers": [0, 2]}),
    "order": (InconsistentError, "ascending", {"target_layers": [4, 2]}),
    "no mask": (InconsistentError, "mask_token_id: missing", {"tokenizer.ggml.mask_token_id": None}),
    "mask": (LimitError, "mask_token_id", {"tokenizer.ggml.mask_token_id": 50}),
    "no vocabulary": (InconsistentError, "vocab_size: missing", {"vocab_size": None}),
    "vocabulary": (InconsistentError, "tokenizer.ggml.tokens", {"tokenizer.ggml.tokens": ["a", "b"]}),
    "no block": (InconsistentError, "dflash.block_size: missing", {"block_size": None}),
    "blocks": (LimitError, "block_size", {"block_size": 1 << 30}),
    "layers": (LimitError, "block_count", {"block_count": 1 << 31}),
    "pattern": (InconsistentError, "sliding_window_pattern", {"attention.sliding_window": 7}),
    "short pattern": (
        InconsistentError,
        "2 values for 3 layers",
        {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, False]},
    ),
    "no window": (
        InconsistentError,
        "sliding_window is none",
        {"attention.sliding_window_pattern": [True, False, False]},
    ),
    "theta": (InconsistentError, "rope.freq_base: missing", {"rope.freq_base": None}),
    "value length": (UnsupportedError, "value_length", {"attention.value_length": 16}),
    "partial": (UnsupportedError, "dimension_count", {"rope.dimension_count": 16}),
    "sections": (UnsupportedError, "dimension_sections", {"rope.dimension_sections": [8, 4, 4, 0]}),
    "longrope": (UnsupportedError, "'longrope', supported are", {"rope.scaling.type": "longrope"}),
    "logits": (UnsupportedError, "logit_scale", {"logit_scale": 0.5}),
    "softcap": (InconsistentError, "-1.0, expected 0.0 to", {"final_logit_softcapping": -1.0}),
    "anchor": (UnsupportedError, "dflash.sample_from_anchor", {"sample_from_anchor": True}),
    "experts": (UnsupportedError, "dflash.expert_count", {"expert_count": 8}),
    "half": (InconsistentError, "conv_group_size: missing", {"conv_kernel_size": 2}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_metadata_that_cannot_be_is_refused_by_name(tmp_path: Path, case: str) -> None:
    kind, message, changes = BROKEN[case]
    named = {key if "ggml" in key else f"dflash.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelFormatError) as caught:
        read(tmp_path, spec_of(config()), changes=named)
    assert type(caught.value) is kind
    assert message in str(caught.value)
    assert "drafter.gguf" in str(caught.value)


def test_another_architecture_is_no_drafter(tmp_path: Path) -> None:
    path = write_gguf_drafter(tmp_path / "other.gguf", spec_of(config()), {}, "qwen35moe")
    match = "'qwen35moe', drafters are dflash, dflash-draft"
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedError, match=match):
        spec_of_metadata(file.metadata)


def test_a_whole_model_is_no_drafter_though_it_holds_a_block(tmp_path: Path) -> None:
    (path,) = write_model(tmp_path / "mtp.gguf", make_model("qwen4exp", nextn=True))
    match = (
        r"'qwen4exp', drafters are .*: give a DFlash drafter, or a sidecar with the model's MTP block alone"
    )
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedError, match=match):
        spec_of_metadata(file.metadata)


@pytest.mark.parametrize("name", OTHER_DRAFTERS)
def test_drafters_of_other_kinds_are_named_with_what_drafts_instead(tmp_path: Path, name: str) -> None:
    path = write_gguf_drafter(tmp_path / "other.gguf", spec_of(config()), {}, name)
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedError) as caught:
        spec_of_metadata(file.metadata)
    message = str(caught.value)
    assert f"{name!r}, {OTHER_DRAFTERS[name]}, which is not supported: give a DFlash drafter" in message
    assert message.endswith("or draft by --spec-type ngram")
