"""Drafters' configurations, as they were published and as they must not be, and the targets they suit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coldstream.errors import (
    ConfigError,
    DuplicateError,
    InconsistentError,
    LimitError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedError,
)
from coldstream.kernels.rope.scaling import Yarn, yarn_magnitude
from coldstream.models.dflash.config import MAX_CONFIG_BYTES, read_config
from coldstream.models.dflash.spec import (
    Dflash2Spec,
    DflashLayer,
    DflashRope,
    check_target,
    tensor_shapes,
    visible_rows,
)
from dflash_cases import CASES, GPT_OSS_YARN, MIXED, SECOND, TINY, YARN, config, spec_of

FULL, SLIDING = "full_attention", "sliding_attention"
FOR_35B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-06,
    "num_target_layers": 40,
    "max_position_embeddings": 262144,
    "hidden_act": "silu",
    "attention_bias": False,
    "block_size": 16,
    "tie_word_embeddings": False,
    "dflash_config": {"target_layer_ids": [1, 10, 19, 28, 37], "mask_token_id": 248070},
}
LATER_LAYERS = [1, 6, 11, 16, 22, 27, 32, 37]
PREVIEW = FOR_35B | {
    "rope_theta": 10000000,
    "rope_scaling": {**YARN, "beta_fast": 32, "beta_slow": 1, "factor": 64},
}
APRIL = FOR_35B | {  # revision 42d3b34d
    "rope_theta": 10000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": [FULL] * 8,
}
JULY = FOR_35B | {  # revision f181eece
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "layer_types": [SLIDING] * 5 + [FULL],
    "use_sliding_window": True,
    "sliding_window": 4096,
    "block_size": None,
    "dflash_config": {"target_layer_ids": LATER_LAYERS, "mask_token_id": 248077, "block_size": 16},
}
DFLASH_2 = JULY | {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": [SLIDING] * 6,
    "sliding_window": 2048,
    "dflash_config": {
        "target_layer_ids": LATER_LAYERS,
        "mask_token_id": 248077,
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
FOR_27B = FOR_35B | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "rope_theta": 1e7,
    "dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070},
}

FOR_GPT_OSS_20B: dict[str, Any] = {  # z-lab/gpt-oss-20b-DFlash
    "architectures": ["DFlashDraftModel"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 7680,
    "layer_types": [FULL] * 8,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_target_layers": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": GPT_OSS_YARN,
    "vocab_size": 201088,
}
FOR_GPT_OSS_120B = FOR_GPT_OSS_20B | {  # z-lab/gpt-oss-120b-DFlash
    "block_size": 10,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
}


def num_values(values: dict[str, Any]) -> int:
    total = 0
    for shape in tensor_shapes(spec_of(values)).values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def test_the_preview_of_april_is_stretched() -> None:
    spec = spec_of(PREVIEW)
    assert spec.rope == DflashRope(1e7, Yarn(64.0, 4096, 32.0, 1.0), yarn_magnitude(64.0))
    assert spec.layers == (DflashLayer(None, False),) * 8
    assert (spec.aux_layers, spec.mask_id, spec.block_size) == ((1, 10, 19, 28, 37), 248070, 16)
    assert (spec.query_dim, spec.kv_dim, spec.feature_size) == (4096, 512, 10240)
    assert 0.46e9 < num_values(PREVIEW) < 0.48e9


def test_the_revision_of_april_is_not() -> None:
    spec = spec_of(APRIL)
    assert spec.rope == DflashRope(1e7)
    assert spec.layers == (DflashLayer(None, False),) * 8


def test_the_revision_of_july_has_other_layers_heads_and_windows() -> None:
    spec = spec_of(JULY)
    assert spec.layers == (DflashLayer(4096, True),) * 5 + (DflashLayer(None, False),)
    assert (spec.num_kv_heads, spec.mask_id, spec.block_size) == (8, 248077, 16)
    assert spec.aux_layers == tuple(LATER_LAYERS)
    shapes = tensor_shapes(spec)
    assert len(shapes) == 69
    assert shapes["fc.weight"] == (2048, 16384)
    assert num_values(JULY) == pytest.approx(385.9e6, abs=0.05e6)


def test_dflash_2_has_convolutions_and_a_selector() -> None:
    spec = spec_of(DFLASH_2)
    assert spec.second == Dflash2Spec(2, 16, 256, 16)
    assert spec.layers == (DflashLayer(2048, False),) * 6
    assert spec.block_size == 8
    shapes = tensor_shapes(spec)
    assert len(shapes) == 6 + 15 * 6
    assert shapes["blk.5.ffn_conv_base"] == (2, 2, 2048)
    assert shapes["blk.5.ffn_conv_proj.weight"] == (512, 2048)
    assert shapes["selector_successor.weight"] == (248320, 256)
    assert num_values(DFLASH_2) == pytest.approx(0.53e9, rel=0.02)


def test_drafters_of_gpt_oss_have_biases() -> None:
    spec = spec_of(FOR_GPT_OSS_20B)
    assert spec.has_attention_bias
    assert spec.layers == (DflashLayer(None, False),) * 8
    assert (spec.mask_id, spec.block_size, spec.aux_layers) == (200000, 8, (1, 6, 11, 16, 21))
    assert spec.rope == DflashRope(150000.0, Yarn(32.0, 4096, truncate=False), yarn_magnitude(32.0))
    of_120b = spec_of(FOR_GPT_OSS_120B)
    assert (of_120b.block_size, of_120b.aux_layers, of_120b.num_target_layers) == (10, (1, 9, 17, 25, 33), 36)
    for values in (FOR_GPT_OSS_20B, FOR_GPT_OSS_120B):
        shapes = tensor_shapes(spec_of(values))
        assert len(shapes) == 123  # of which 32 are biases
        assert shapes["blk.7.attn_q.bias"] == (4096,)
        assert shapes["blk.7.attn_v.bias"] == (512,)
        assert shapes["blk.7.attn_output.bias"] == (2880,)
        assert num_values(values) == pytest.approx(0.785e9, rel=0.001)  # 1.46 GiB of bfloat16
    assert not spec_of(FOR_GPT_OSS_20B | {"attention_bias": None}).has_attention_bias


@pytest.mark.parametrize("window", [None, 2048])
def test_drafters_of_the_27b_model(window: int | None) -> None:
    changes: dict[str, Any] = {}
    if window:
        changes = {"layer_types": [SLIDING] * 4 + [FULL], "sliding_window": window}
    spec = spec_of(FOR_27B | changes)
    assert spec.layers[0] == DflashLayer(window, window is not None)
    assert spec.layers[-1] == DflashLayer(None, False)
    assert num_values(FOR_27B | changes) == pytest.approx(1.73e9, rel=0.01)


def test_trap_28_theta_has_no_default_and_may_be_nested() -> None:
    without = {key: value for key, value in TINY.items() if key != "rope_theta"}
    with pytest.raises(InconsistentError, match="rope_theta: missing"):
        spec_of(without)
    for rope in ({"rope_theta": 5e6}, {"rope_type": "default", "rope_theta": 5000000}):
        assert spec_of(without | {"rope_parameters": rope}).rope == DflashRope(5e6)
    with pytest.raises(InconsistentError, match="rope_theta: 1000000"):
        spec_of(TINY | {"rope_parameters": {"rope_theta": 1e6}})


def test_windows_without_types_of_layers_are_those_of_transformers() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    layers = spec_of(config(**windows)).layers
    assert [layer.window for layer in layers] == [None, 7, 7]
    assert [layer.is_causal for layer in layers] == [False, True, True]


SECTION = TINY["dflash_config"]
BROKEN: dict[str, tuple[type[ModelFormatError], str, dict[str, Any]]] = {
    "no layers": (InconsistentError, "num_hidden_layers: 0, expected 1", {"num_hidden_layers": 0}),
    "many layers": (LimitError, "num_hidden_layers: 1000000", {"num_hidden_layers": 10**6}),
    "text": (InconsistentError, "hidden_size: a string", {"hidden_size": "64"}),
    "bool": (InconsistentError, "hidden_size: a bool", {"hidden_size": True}),
    "fraction": (InconsistentError, "hidden_size: a float", {"hidden_size": 64.5}),
    "list": (InconsistentError, "hidden_size: an array", {"hidden_size": [64]}),
    "object": (InconsistentError, "hidden_size: an array", {"hidden_size": {"a": 1}}),
    "null": (InconsistentError, "head_dim: missing", {"head_dim": None}),
    "huge": (LimitError, "vocab_size", {"vocab_size": 10**40}),
    "huge float": (LimitError, "rope_theta: inf", {"rope_theta": 10**400}),
    "eps": (InconsistentError, "rms_norm_eps", {"rms_norm_eps": 0}),
    "odd": (InconsistentError, "head_dim: 31 is odd", {"head_dim": 31}),
    "heads": (InconsistentError, "num_key_value_heads: 3 heads", {"num_key_value_heads": 3}),
    "mask": (LimitError, "mask_token_id: 50", {"dflash_config": SECTION | {"mask_token_id": 50}}),
    "no mask": (InconsistentError, "mask_token_id: missing", {"dflash_config": {"target_layer_ids": [1]}}),
    "no section": (InconsistentError, "mask_token_id: missing", {"dflash_config": None}),
    "section": (InconsistentError, "dflash_config: 'text'", {"dflash_config": "text"}),
    "no auxiliary layers": (InconsistentError, "target_layer_ids", {"dflash_config": {"mask_token_id": 1}}),
    "order": (InconsistentError, "ascending", {"dflash_config": SECTION | {"target_layer_ids": [3, 1]}}),
    "twice": (InconsistentError, "ascending", {"dflash_config": SECTION | {"target_layer_ids": [1, 1]}}),
    "negative": (InconsistentError, "-1", {"dflash_config": SECTION | {"target_layer_ids": [-1, 1]}}),
    "beyond": (InconsistentError, "layer 8", {"dflash_config": SECTION | {"target_layer_ids": [1, 8]}}),
    "many auxiliary layers": (
        LimitError,
        "100 layers, the limit is 64",
        {"dflash_config": SECTION | {"target_layer_ids": list(range(100))}},
    ),
    "auxiliary layers far up": (
        InconsistentError,
        "target_layer_ids",
        {"dflash_config": SECTION | {"target_layer_ids": [1, 10**30]}},
    ),
    "block": (LimitError, "block_size", {"block_size": 10**6}),
    "short block": (InconsistentError, "block_size: 1", {"block_size": 1}),
    "two blocks": (InconsistentError, "block_size", {"dflash_config": SECTION | {"block_size": 9}}),
    "types": (InconsistentError, "layer_types", {"layer_types": ["full_attention"]}),
    "type": (UnsupportedError, "layer_types: 'chunked'", {"layer_types": ["chunked"] * 3}),
    "no window": (InconsistentError, "sliding_window: missing", {"layer_types": [SLIDING] * 3}),
    "window": (InconsistentError, "sliding_window: 0", MIXED | {"sliding_window": 0}),
    "wide": (LimitError, "sliding_window", MIXED | {"sliding_window": 1 << 40}),
    "no sliding": (InconsistentError, "use_sliding_window", MIXED | {"use_sliding_window": False}),
    "rope": (UnsupportedError, "rope_type: 'llama3'", {"rope_scaling": {"rope_type": "llama3"}}),
    "rope key": (UnsupportedError, "rope_scaling.mscale", {"rope_scaling": YARN | {"mscale": 1.0}}),
    "ramp": (InconsistentError, "truncate", {"rope_scaling": YARN | {"truncate": 0}}),
    "factor": (InconsistentError, "factor: 0.5", {"rope_scaling": YARN | {"factor": 0.5}}),
    "unscaled": (InconsistentError, "factor: missing", {"rope_scaling": {"rope_type": "yarn"}}),
    "act": (UnsupportedError, "hidden_act: 'gelu'", {"hidden_act": "gelu"}),
    "bias": (InconsistentError, "attention_bias", {"attention_bias": "queries"}),
    "softcap": (InconsistentError, "final_logit_softcapping: -1", {"final_logit_softcapping": -1}),
    "scale": (
        UnsupportedError,
        "input_embedding_scale",
        {"dflash_config": SECTION | {"input_embedding_scale": 2.0}},
    ),
    "speculators": (UnsupportedError, "speculators_model_type", {"speculators_model_type": "dflash"}),
    "quantised": (UnsupportedError, "quantization_config", {"quantization_config": {"bits": 4}}),
    "kind": (UnsupportedError, "'DSparkDraftModel'", {"architectures": ["DSparkDraftModel"]}),
    "not second": (InconsistentError, "it lacks conv_kernel", {"architectures": ["DFlash2DraftModel"]}),
    "second": (InconsistentError, "there are conv_kernel", {"dflash_config": SECTION | SECOND}),
    "head": (UnsupportedError, "dflash_config.domino", {"dflash_config": SECTION | {"domino": {}}}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_configuration_that_cannot_be_is_refused_by_name(case: str) -> None:
    kind, message, changes = BROKEN[case]
    with pytest.raises(kind) as caught:
        spec_of(TINY | changes)
    assert type(caught.value) is kind
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("conv_kernel_size", None, InconsistentError),
        ("conv_kernel_size", 10**9, LimitError),
        ("conv_group_size", 24, InconsistentError),
        ("conv_group_size", 65, LimitError),
        ("selector_rank", 0, InconsistentError),
        ("selector_top_k", 51, LimitError),
    ],
)
def test_numbers_of_the_second_kind_are_checked(key: str, value: Any, kind: type[ModelFormatError]) -> None:
    values = config(True)
    values["dflash_config"][key] = value
    with pytest.raises(kind, match=key):
        spec_of(values)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", InconsistentError),
        ("[1]", InconsistentError),
        ("{", InconsistentError),
        (json.dumps(TINY | {"unused": float("nan")}), InconsistentError),
        (json.dumps(TINY | {"unused": float("-inf")}), InconsistentError),
        ("[" * 100_000, InconsistentError),
        ('{"a": ' + "9" * 5000 + "}", InconsistentError),
        ('{"a": 1, "a": 2}', DuplicateError),
        (" " * (MAX_CONFIG_BYTES + 1), LimitError),
    ],
)
def test_text_that_is_no_configuration_is_refused(
    tmp_path: Path, text: str, kind: type[ModelFormatError]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(kind, match=r"config\.json"):
        read_config(path)


def test_a_configuration_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ModelNotFoundError, match="beside its weights"):
        read_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InconsistentError, match="not valid JSON"):
        read_config(path)
    for values in CASES.values():
        path.write_text(json.dumps(values))
        assert read_config(path) == spec_of(values)


def target(**changes: Any) -> Any:
    numbers = {"vocab_size": 50, "hidden_size": 64, "num_layers": 8, "hyper_connections": None}
    return SimpleNamespace(**(numbers | changes))


def test_trap_35_a_target_of_another_shape_is_an_error_with_its_reason() -> None:
    spec = spec_of(TINY)
    check_target(spec, target())
    for changes, reason in (
        ({"vocab_size": 60}, "a vocabulary of 50 tokens, and the model has 60"),
        ({"hidden_size": 32}, "a hidden size of 64, and the model has 32"),
        ({"num_layers": 9}, "8 layers, and the model has 9"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            check_target(spec, target(**changes))
        assert "give the drafter that was trained for this model" in str(caught.value)
    unstated = spec_of(TINY | {"num_target_layers": None})
    check_target(unstated, target(num_layers=7))
    with pytest.raises(ConfigError, match="after layer 6, and the last layer of the model is 5"):
        check_target(unstated, target(num_layers=6))
    streams = target(architecture="qwen4exp", hyper_connections=SimpleNamespace(num_streams=4))
    with pytest.raises(ConfigError, match="reads one residual stream, and qwen4exp has 4"):
        check_target(spec, streams)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_nearer_than_the_window_are_seen(window: int | None, is_causal: bool) -> None:
    queries, keys = np.arange(5, 9), np.arange(12)
    found = visible_rows(DflashLayer(window, is_causal), queries, keys)
    for row, query in enumerate(queries):
        for column, key in enumerate(keys):
            is_seen = (window is None or abs(key - query) < window) and (key <= query or not is_causal)
            assert (found is None or found[row, column]) == is_seen
