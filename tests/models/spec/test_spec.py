"""Numbers of a model: every variant that converters write is read, every contradiction is named."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import SMALL, Dims, TinyModel, make_model
from coldstream.errors import InconsistentError, LimitError, ModelFormatError, UnsupportedError
from coldstream.kernels.ops import RopeSpec
from coldstream.models import ModelSpec, read_spec
from coldstream.models.spec.layer_specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    LayerSpec,
    MoeSpec,
)
from specs import with_layers

LoadSpec = Callable[[TinyModel], ModelSpec]


def tiny(arch: str = "qwen35moe", dims: Dims = SMALL, **options: Any) -> TinyModel:
    return make_model(arch, dims=dims, quant="F32", tokenizer=False, **options)


def changed(changes: dict[str, Any], arch: str = "qwen35moe", **options: Any) -> TinyModel:
    """A model with other values for some keys; None removes a key."""
    model = tiny(arch, **options)
    for key, value in changes.items():
        name = key if key.startswith("general.") else f"{arch}.{key}"
        model.metadata.pop(name, None)
        if value is not None:
            model.metadata[name] = value
    return model


def rename(model: TinyModel, old: str, new: str) -> None:
    model.tensors = {name.replace(old, new): values for name, values in model.tensors.items()}
    model.types = {name.replace(old, new): kind for name, kind in model.types.items()}


def test_moe(load_spec: LoadSpec) -> None:
    spec = load_spec(tiny())
    assert spec.rms_norm_eps == pytest.approx(1e-6)
    attention = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope=RopeSpec(4, 1e7),
        output_gate="query",
        qk_norm="head",
    )
    delta_net = DeltaNetSpec(
        conv_kernel=4, state_size=8, num_key_heads=2, num_value_heads=4, value_heads_grouped=False
    )
    ffn = MoeSpec(num_experts=4, num_experts_per_tok=2, ffn_size=32, shared="gated", shared_ffn_size=64)
    assert spec == ModelSpec(
        architecture="qwen35moe",
        hidden_size=32,
        vocab_size=16,
        context_length=4096,
        rms_norm_eps=spec.rms_norm_eps,
        tied_output=False,
        layers=(*[LayerSpec(delta_net, ffn)] * 3, LayerSpec(attention, ffn)),
    )
    assert (spec.is_moe, spec.num_layers, spec.num_blocks) == (True, 4, 4)
    assert (spec.kv_heads, attention.query_dim, attention.kv_dim) == (((2, 8),), 32, 16)
    assert (spec.num_value_heads, spec.ssm_state_size, spec.conv_kernel, spec.conv_dim) == (4, 8, 4, 64)
    assert (delta_net.key_dim, delta_net.value_dim) == (16, 32)
    assert (spec.num_experts, spec.num_experts_per_tok) == (4, 2)


def test_dense(load_spec: LoadSpec) -> None:
    spec = load_spec(tiny("qwen35", tied=True))
    assert (spec.architecture, spec.is_moe, spec.tied_output) == ("qwen35", False, True)
    assert {layer.ffn for layer in spec.blocks} == {DenseFfnSpec(64)}
    assert (spec.num_experts, spec.num_experts_per_tok) == (0, 0)


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("key", [1, 0, None])
def test_mtp_block_is_not_part_of_the_trunk(load_spec: LoadSpec, arch: str, key: int | None) -> None:
    """Also where the converter kept the tensors and lost the key, or wrote 0."""
    spec = load_spec(changed({"nextn_predict_layers": key}, arch, nextn=True))
    assert (spec.num_layers, spec.num_nextn_layers, spec.num_blocks) == (4, 1, 5)
    assert len(spec.layer_kinds) == 4
    assert spec.blocks[4].kind == "attention"


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_mtp_blocks_that_are_declared_and_absent(load_spec: LoadSpec, arch: str, num_blocks: int) -> None:
    """The file is what it would be without the declaration, and the spec says what it lacks."""
    layers = 4 + num_blocks
    changes = {
        "nextn_predict_layers": num_blocks,
        "block_count": layers,
        "attention.head_count_kv": [2] * layers,
        "attention.recurrent_layers": [True, True, True, False] + [False] * num_blocks,
    }
    spec, plain = load_spec(changed(changes, arch)), load_spec(tiny(arch))
    assert spec.num_absent_nextn_layers == num_blocks
    assert replace(spec, num_absent_nextn_layers=0) == plain
    (warning,) = spec.warnings
    assert f"{arch}.nextn_predict_layers is {num_blocks}" in warning
    assert plain.warnings == ()


def test_mtp_blocks_that_are_partly_there(load_spec: LoadSpec) -> None:
    """The first missing tensor is named, whatever is there."""
    with pytest.raises(InconsistentError, match=r"blk\.3\.nextn\.eh_proj\.weight .* is missing"):
        load_spec(changed({"nextn_predict_layers": 1}))
    whole = tiny(nextn=True)
    names = [name for name in whole.tensors if name.startswith("blk.4.")]
    for kept in names:
        model = tiny(nextn=True)
        model.tensors = {name: v for name, v in model.tensors.items() if name not in names or name == kept}
        with pytest.raises(InconsistentError, match=r"the tensor blk\.4\.\S+ .* is missing"):
            load_spec(model)
    with pytest.raises(InconsistentError, match=r"the tensor blk\.5\.attn_norm\.weight .* is missing"):
        load_spec(changed({"nextn_predict_layers": 2, "block_count": 6}, nextn=True))


def test_mtp_only_file(load_spec: LoadSpec) -> None:
    model = tiny(nextn=True)
    model.tensors = {
        name: v
        for name, v in model.tensors.items()
        if not name.startswith(tuple(f"blk.{i}." for i in range(4)))
    }
    with pytest.raises(UnsupportedError, match="holds only the MTP"):
        load_spec(model)


def test_nothing_but_mtp_blocks(load_spec: LoadSpec) -> None:
    with pytest.raises(InconsistentError, match="holds no layer to run"):
        load_spec(changed({"nextn_predict_layers": 4}))


def test_recurrent_layers_win_over_the_interval(load_spec: LoadSpec) -> None:
    flags = [False, True, True, False]
    model = changed({"attention.recurrent_layers": flags})
    full, linear = tiny(dims=replace(SMALL, interval=1)), tiny()
    for layer, recurrent in enumerate(flags):
        prefix = f"blk.{layer}."
        source = linear.tensors if recurrent and layer != 3 else full.tensors
        model.tensors = {name: v for name, v in model.tensors.items() if not name.startswith(prefix)}
        model.tensors |= {name: v for name, v in source.items() if name.startswith(prefix)}
    assert load_spec(model).layer_kinds == ("attention", "delta_net", "delta_net", "attention")


@pytest.mark.parametrize("nextn", [False, True])
def test_recurrent_layers_with_and_without_the_mtp_block(load_spec: LoadSpec, nextn: bool) -> None:
    flags = [True, True, True, False] + [False] * nextn
    spec = load_spec(
        changed({"attention.recurrent_layers": flags, "full_attention_interval": None}, nextn=nextn)
    )
    assert spec.layer_kinds == ("delta_net", "delta_net", "delta_net", "attention")


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({"attention.recurrent_layers": [True, False, True, False]}, 1),
        ({"full_attention_interval": 3}, 2),
        ({"full_attention_interval": None, "attention.head_count_kv": [0, 2, 0, 2]}, 1),
    ],
)
def test_kinds_that_contradict_the_tensors(load_spec: LoadSpec, changes: dict[str, Any], layer: int) -> None:
    with pytest.raises(
        InconsistentError, match=rf"makes layer {layer} attention, but the tensor blk\.{layer}\.ssm_a is pres"
    ):
        load_spec(changed(changes))


def test_kinds_by_tensors_alone(load_spec: LoadSpec) -> None:
    spec = load_spec(changed({"full_attention_interval": None}))
    assert spec.layer_kinds == ("delta_net", "delta_net", "delta_net", "attention")


def test_per_layer_arrays(load_spec: LoadSpec) -> None:
    changes = {
        "expert_feed_forward_length": [32] * 5,
        "attention.head_count_kv": [2] * 5,
        "attention.head_count": [4] * 4,
    }
    assert load_spec(changed(changes, nextn=True)) == load_spec(tiny(nextn=True))


def test_per_layer_arrays_that_differ(load_spec: LoadSpec) -> None:
    with pytest.raises(UnsupportedError, match=r"expert_feed_forward_length .*differs between layers"):
        load_spec(changed({"expert_feed_forward_length": [32, 32, 64, 32]}))
    with pytest.raises(InconsistentError, match=r"head_count_kv .*2 values for 4 layers"):
        load_spec(changed({"attention.head_count_kv": [2, 2]}))


def ollama(arch: str, reordered: bool | None) -> TinyModel:
    """As written by Ollama's converter: kinds in head_count_kv, own rope keys, no `.bias`, vision tensors."""
    changes = {
        "attention.head_count_kv": [0, 0, 0, 2],
        "full_attention_interval": None,
        "mrope_sections": [11, 11, 10],
        "rope.mrope_section": [11, 11, 10],
        "rope.mrope_interleaved": True,
        "rope.dimension_sections": [11, 11, 10],
        "vision.block_count": 27,
        "norm_top_k_prob": True,
        "ssm.v_head_reordered": reordered,
    }
    if arch == "qwen35moe":
        changes["feed_forward_length"] = 0
    model = changed(changes, arch)
    rename(model, "ssm_dt.bias", "ssm_dt")
    model.tensors |= {
        "v.blk.0.attn_q.weight": model.tensors["output_norm.weight"],
        "mtp.fc.weight": model.tensors["output.weight"],
    }
    return model


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize(("reordered", "grouped"), [(True, False), (False, True), (None, True)])
def test_ollama_files(load_spec: LoadSpec, arch: str, reordered: bool | None, grouped: bool) -> None:
    spec = load_spec(ollama(arch, reordered))
    assert spec == with_layers(load_spec(tiny(arch)), DeltaNetSpec, value_heads_grouped=grouped)
    assert spec.delta_net.key_head_ids == ((0, 0, 1, 1) if grouped else (0, 1, 0, 1))


def test_trap_01_value_heads_are_tiled(load_spec: LoadSpec) -> None:
    dims = replace(SMALL, key_heads=2, value_heads=6)
    assert load_spec(tiny(dims=dims)).delta_net.key_head_ids == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"general.architecture": "clip"}, "a vision projector"),
        ({"general.type": "mmproj"}, "a vision projector"),
        ({"general.type": "adapter"}, "a LoRA adapter"),
        ({"general.type": "imatrix"}, "an importance matrix"),
        (
            {"general.architecture": "llama"},
            r"'llama': supported are qwen35, qwen35moe, qwen3moe, .* and \w+",
        ),
        ({"general.architecture": " "}, "architecture ' '"),
        ({"general.architecture": "x" * 10_000_000}, "architecture 'xxx"),
        (
            {"rope.scaling.type": "longrope"},
            r"scaling\.type at byte \d+: 'longrope', supported: none, linear",
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 8.0},
            r"yarn_beta_fast at byte \d+: 8, supported: 32",
        ),
        (
            {"rope.dimension_sections": [2, 0, 0, 0]},
            r"sections at byte \d+: \[2, 0, 0, 0\] gives the pair 1 of 2",
        ),
        ({"expert_gating_func": 2}, r"expert_gating_func at byte \d+: 2, supported: softmax \(1\)"),
        ({"expert_gating_func": 9}, r"expert_gating_func at byte \d+: 9, known: 1 to 4"),
        ({"expert_group_count": 4}, r"expert_group_count at byte \d+: 4, supported: 1"),
        ({"attention.sliding_window": 128}, r"sliding_window at byte \d+: 128, supported: all positions"),
        ({"attention.causal": False}, r"causal at byte \d+: False, supported: causal attention"),
        ({"attention.scale": 0.5}, r"attention.scale at byte \d+: 0.5, supported: 1 / sqrt"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale"),
        (
            {"expert_weights_norm": False},
            r"weights_norm at byte \d+: False, supported: normalised",
        ),
        ({"norm_top_k_prob": False}, r"top_k_prob at byte \d+: False, supported: normalised expert"),
    ],
)
def test_what_is_not_supported(load_spec: LoadSpec, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        load_spec(changed(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_gating_func": 0, "expert_weights_scale": 0.0, "expert_group_count": 0},
        {"expert_gating_func": 1, "expert_weights_scale": 1.0, "expert_group_count": 1},
        {"attention.sliding_window": 0, "attention.scale": 0.0},
        {"attention.sliding_window": 4096, "attention.scale": 8**-0.5},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "expert_weights_norm": True},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.type": "yarn", "attention.causal": True},
        {"rope.scaling.factor": 0.0, "rope.scaling.yarn_beta_fast": 8.0},
        {"rope.scaling.factor": 1.0, "rope.scale_linear": 4.0},
        {"rope.dimension_sections": [1, 1, 0, 3]},
    ],
)
def test_keys_that_state_the_usual(load_spec: LoadSpec, changes: dict[str, Any]) -> None:
    """Among them a window that is as long as the context."""
    assert load_spec(changed(changes)) == load_spec(tiny())


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"block_count": 0}, InconsistentError),
        ({"block_count": 1 << 31}, LimitError),
        ({"block_count": 3}, InconsistentError),
        ({"block_count": 5}, InconsistentError),
        ({"attention.head_count": 0}, InconsistentError),
        ({"attention.head_count": 3}, ModelFormatError),
        ({"attention.head_count": 1 << 20}, LimitError),
        ({"attention.head_count_kv": 0}, InconsistentError),
        ({"attention.head_count_kv": 3}, InconsistentError),
        ({"attention.head_count_kv": 8}, LimitError),
        ({"attention.key_length": 0}, InconsistentError),
        ({"attention.key_length": 4}, InconsistentError),
        ({"attention.value_length": 16}, InconsistentError),
        ({"expert_count": 0}, InconsistentError),
        ({"expert_count": 70000}, LimitError),
        ({"expert_count": 8}, InconsistentError),
        ({"expert_used_count": 0}, InconsistentError),
        ({"expert_used_count": 5}, LimitError),
        ({"expert_feed_forward_length": 0}, InconsistentError),
        ({"expert_feed_forward_length": 1 << 31}, LimitError),
        ({"expert_shared_feed_forward_length": 0}, InconsistentError),
        ({"vocab_size": 17}, InconsistentError),
        ({"embedding_length": 0}, InconsistentError),
        ({"embedding_length": 64}, InconsistentError),
        ({"embedding_length": 1 << 31}, LimitError),
        ({"rope.freq_base": 0.0}, InconsistentError),
        ({"rope.freq_base": -1.0}, InconsistentError),
        ({"rope.freq_base": math.nan}, InconsistentError),
        ({"rope.freq_base": math.inf}, LimitError),
        ({"rope.dimension_count": 0}, InconsistentError),
        ({"rope.dimension_count": 3}, InconsistentError),
        ({"rope.dimension_count": 10}, LimitError),
        ({"rope.scaling.factor": -1.0}, InconsistentError),
        ({"rope.scaling.attn_factor": 0.0}, InconsistentError),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1.0}, InconsistentError),
        ({"rope.scaling.factor": math.nan}, InconsistentError),
        ({"attention.layer_norm_rms_epsilon": 0.0}, InconsistentError),
        ({"attention.layer_norm_rms_epsilon": -1e-6}, InconsistentError),
        ({"attention.layer_norm_rms_epsilon": math.nan}, InconsistentError),
        ({"attention.layer_norm_rms_epsilon": 1.0}, LimitError),
        ({"context_length": 0}, InconsistentError),
        ({"context_length": (1 << 32) - 1}, LimitError),
        ({"ssm.conv_kernel": 0}, InconsistentError),
        ({"ssm.conv_kernel": 1 << 20}, LimitError),
        ({"ssm.state_size": 0}, InconsistentError),
        ({"ssm.group_count": 0}, InconsistentError),
        ({"ssm.group_count": 3}, InconsistentError),
        ({"ssm.group_count": 5}, LimitError),
        ({"ssm.time_step_rank": 0}, InconsistentError),
        ({"ssm.inner_size": 31}, InconsistentError),
        ({"full_attention_interval": 0}, InconsistentError),
        ({"nextn_predict_layers": 100}, LimitError),
        ({"expert_weights_norm": True, "norm_top_k_prob": False}, InconsistentError),
    ],
)
def test_gg12_hyper_parameters(
    load_spec: LoadSpec, changes: dict[str, Any], kind: type[ModelFormatError]
) -> None:
    with pytest.raises(kind) as caught:
        load_spec(changed(changes))
    assert "tiny.gguf: " in str(caught.value)


REQUIRED = [
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [None, "4", True, ["4"]])
def test_gg06_known_keys_missing_or_of_another_type(load_spec: LoadSpec, name: str, value: Any) -> None:
    with pytest.raises(InconsistentError, match=rf"qwen35moe\.{name}( at byte \d+)?: (missing|an? )"):
        load_spec(changed({name: value}))


@pytest.mark.parametrize("name", REQUIRED)
def test_gg06_integers_as_floats_and_back(load_spec: LoadSpec, name: str) -> None:
    value = 1 if name in ("rope.freq_base", "attention.layer_norm_rms_epsilon") else 4.0
    with pytest.raises(InconsistentError, match=r"expected (a float|an integer)"):
        load_spec(changed({name: value}))


def test_gg12_architecture_missing_or_of_another_type(load_spec: LoadSpec) -> None:
    with pytest.raises(InconsistentError, match=r"general\.architecture: missing"):
        read_spec({}, {})
    for value in (7, True, ["qwen35"]):
        with pytest.raises(InconsistentError, match=r"general\.architecture at byte"):
            load_spec(changed({"general.architecture": value}))


def test_gg12_vocabulary_of_another_size(load_spec: LoadSpec) -> None:
    model = make_model(dims=replace(SMALL, vocab=320))
    model.metadata["tokenizer.ggml.tokens"].pop()
    with pytest.raises(InconsistentError, match=r"tokenizer\.ggml\.tokens .*319 tokens, but .* 320 rows"):
        load_spec(model)


@given(
    arch=st.sampled_from(["qwen35", "qwen35moe"]),
    layers=st.integers(1, 9),
    interval=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    heads_per_kv=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    values_per_key=st.integers(1, 3),
    experts=st.integers(1, 5),
    switches=st.fixed_dictionaries(
        dict.fromkeys(("nextn", "fused_experts", "fused_attention", "tied"), st.booleans())
    ),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_any_dimensions_give_them_back(
    load_spec: LoadSpec,
    arch: str,
    layers: int,
    interval: int,
    kv_heads: int,
    heads_per_kv: int,
    key_heads: int,
    values_per_key: int,
    experts: int,
    switches: dict[str, bool],
) -> None:
    dims = replace(
        SMALL,
        layers=layers,
        interval=interval,
        heads=kv_heads * heads_per_kv,
        kv_heads=kv_heads,
        key_heads=key_heads,
        value_heads=key_heads * values_per_key,
        experts=experts,
        experts_used=1,
    )
    spec = load_spec(tiny(arch, dims, **switches))
    assert (spec.num_layers, spec.num_nextn_layers) == (layers, switches["nextn"])
    assert [kind == "attention" for kind in spec.layer_kinds] == [
        (i + 1) % interval == 0 for i in range(layers)
    ]
    has_delta_net = interval > 1
    for model, num_layers in ((spec, layers // interval), (spec.nextn, switches["nextn"])):
        assert [each.num_heads for each in model.attentions] == [dims.heads] * num_layers
        assert model.kv_heads == ((kv_heads, dims.head_dim),) * num_layers
    expected_ids = sorted(list(range(key_heads)) * values_per_key) if has_delta_net else []
    assert sorted(spec.delta_net.key_head_ids) == expected_ids
    assert spec.tied_output == switches["tied"]
