"""The list of tensors: complete, with the right shapes, and every deviation in a file is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import SMALL, TinyModel, make_model, write_model
from coldstream.errors import InconsistentError, ModelFormatError, UnsupportedError
from coldstream.gguf import GGUFFile, QuantType
from coldstream.kernels.ops import OutputGate, RopeSpec
from coldstream.models import ModelSpec, block_tensors, global_tensors, read_spec, validate_tensors
from coldstream.models.spec.layer_specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    LayerSpec,
    MoeSpec,
    ProjectionBias,
)
from coldstream.models.spec.layer_tensors import attention_tensors

LoadSpec = Callable[[TinyModel], ModelSpec]


def tiny(arch: str = "qwen35moe", **options: Any) -> TinyModel:
    return make_model(arch, dims=SMALL, quant="F32", tokenizer=False, **options)


def qwen36(is_moe: bool, num_nextn_layers: int = 0) -> ModelSpec:
    """The published numbers of Qwen3.6-35B-A3B and Qwen3.6-27B."""
    attention = AttentionSpec(
        num_heads=16 if is_moe else 24,
        num_kv_heads=2 if is_moe else 4,
        head_dim=256,
        rope=RopeSpec(64, 1e7),
        output_gate="query",
        qk_norm="head",
    )
    delta_net = DeltaNetSpec(
        conv_kernel=4,
        state_size=128,
        num_key_heads=16,
        num_value_heads=32 if is_moe else 48,
        value_heads_grouped=False,
    )
    moe = MoeSpec(num_experts=256, num_experts_per_tok=8, ffn_size=512, shared="gated", shared_ffn_size=512)
    ffn = moe if is_moe else DenseFfnSpec(17408)
    period = (*[LayerSpec(delta_net, ffn)] * 3, LayerSpec(attention, ffn))
    return ModelSpec(
        architecture="qwen35moe" if is_moe else "qwen35",
        hidden_size=2048 if is_moe else 5120,
        vocab_size=248320,
        context_length=262144,
        rms_norm_eps=1e-6,
        tied_output=False,
        layers=period * (10 if is_moe else 16),
        nextn_layers=(LayerSpec(attention, ffn),) * num_nextn_layers,
    )


def split_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name → shape in a file of the usual kind: nothing fused, no tables of MTP blocks."""
    requirements = list(global_tensors(spec))
    for block in range(spec.num_blocks):
        requirements += block_tensors(spec, block)
    return {
        name: shapes[0]
        for alternatives in requirements
        for name, shapes in alternatives[0].items()
        if {} not in alternatives or name.endswith("shared_head_norm.weight")
    }


@pytest.mark.parametrize(
    ("is_moe", "num_nextn_layers", "num_tensors"),
    [(True, 0, 733), (True, 1, 753), (False, 0, 851), (False, 1, 866)],
)
def test_tensor_counts_of_published_files(is_moe: bool, num_nextn_layers: int, num_tensors: int) -> None:
    assert len(split_tensors(qwen36(is_moe, num_nextn_layers))) == num_tensors


def test_shapes_of_published_files() -> None:
    moe, dense = split_tensors(qwen36(True, 1)), split_tensors(qwen36(False))
    assert moe["token_embd.weight"] == (248320, 2048)
    assert moe["blk.0.attn_qkv.weight"] == (8192, 2048)
    assert moe["blk.0.attn_gate.weight"] == (4096, 2048)
    assert moe["blk.0.ssm_conv1d.weight"] == (8192, 4)
    assert moe["blk.0.ssm_out.weight"] == (2048, 4096)
    assert moe["blk.3.attn_q.weight"] == (8192, 2048)
    assert moe["blk.3.attn_v.weight"] == (512, 2048)
    assert moe["blk.3.attn_output.weight"] == (2048, 4096)
    assert moe["blk.0.ffn_gate_exps.weight"] == (256, 512, 2048)
    assert moe["blk.0.ffn_down_exps.weight"] == (256, 2048, 512)
    assert moe["blk.40.nextn.eh_proj.weight"] == (2048, 4096)
    assert moe["blk.40.attn_q.weight"] == (8192, 2048)
    assert dense["blk.0.attn_qkv.weight"] == (10240, 5120)
    assert dense["blk.0.ssm_alpha.weight"] == (48, 5120)
    assert dense["blk.3.attn_q.weight"] == (12288, 5120)
    assert dense["blk.0.ffn_down.weight"] == (5120, 17408)


@pytest.mark.parametrize(
    ("output_gate", "query_rows", "gate_rows"),
    [("none", 96, None), ("query", 192, None), ("head", 96, 6), ("element", 96, 96)],
)
def test_gates_of_attention_have_rows_or_a_tensor(
    output_gate: OutputGate, query_rows: int, gate_rows: int | None
) -> None:
    spec = AttentionSpec(6, 2, 16, RopeSpec(16, 1e4), output_gate=output_gate, qk_norm="head")
    shapes = {name: shape for group in attention_tensors(spec, 64) for name, (shape,) in group[0].items()}
    assert shapes["attn_q.weight"] == (query_rows, 64)
    assert shapes.get("attn_gate.weight") == (None if gate_rows is None else (gate_rows, 64))


@pytest.mark.parametrize(
    ("bias", "names"),
    [
        ("none", set()),
        ("qkv", {"attn_q.bias", "attn_k.bias", "attn_v.bias"}),
        ("all", {"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"}),
    ],
)
def test_projections_of_attention_may_have_biases(bias: ProjectionBias, names: set[str]) -> None:
    spec = AttentionSpec(6, 2, 16, RopeSpec(16, 1e4), bias=bias, sinks=True)
    shapes = {name: shape for group in attention_tensors(spec, 64) for name, (shape,) in group[0].items()}
    assert {name for name in shapes if name.endswith(".bias")} == names
    assert all(shapes[name] == ((32 if name[5] in "kv" else 96 if name[5] == "q" else 64),) for name in names)
    assert shapes["attn_sinks.weight"] == (6,)


def test_attention_may_lack_norms_and_a_projection_of_values() -> None:
    spec = AttentionSpec(6, 2, 16, RopeSpec(16, 1e4), values_are_keys=True)
    split, *others = attention_tensors(spec, 64)
    assert [set(group) for group in split] == [{"attn_q.weight", "attn_k.weight"}, {"attn_qkv.weight"}]
    assert split[1]["attn_qkv.weight"] == ((6 * 16 + 2 * 16, 64),)
    assert [set(group) for (group,) in others] == [{"attn_output.weight"}]


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_gg11_every_tensor_is_required(load_spec: LoadSpec, arch: str) -> None:
    complete = tiny(arch, nextn=True)
    for name in complete.tensors:
        if name in ("output.weight", "blk.4.nextn.eh_proj.weight", "blk.4.nextn.shared_head_norm.weight"):
            # Without the first the output is tied, without the second the block is no MTP block, and the
            # model's last norm stands for the third.
            continue
        model = tiny(arch, nextn=True)
        del model.tensors[name]
        with pytest.raises(InconsistentError, match=name.replace(".", r"\.")):
            load_spec(model)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_gg11_every_shape_is_checked(load_spec: LoadSpec, arch: str) -> None:
    """Each tensor in turn with its first two dimensions exchanged, or with one element more."""
    complete = tiny(arch, nextn=True)
    for name, values in complete.tensors.items():
        wrong = values.swapaxes(0, 1) if values.ndim > 1 else np.append(values, values[-1:])
        if wrong.shape == values.shape:
            wrong = np.concatenate([values, values])
        model = tiny(arch, nextn=True)
        model.tensors[name] = np.ascontiguousarray(wrong)
        with pytest.raises(ModelFormatError, match=name.split(".weight")[0].replace(".", r"\.")) as caught:
            load_spec(model)
        assert type(caught.value) is InconsistentError


def test_gg11_the_message_names_place_and_both_shapes(load_spec: LoadSpec) -> None:
    model = tiny()
    model.tensors["blk.3.attn_k.weight"] = np.zeros((32, 32), np.float32)
    place = r"tiny\.gguf: the tensor blk\.3\.attn_k\.weight \(data at byte \d+\)"
    with pytest.raises(InconsistentError, match=rf"{place} has shape \[32, 32\], expected \[16, 32\]"):
        load_spec(model)


def test_gg11_one_layer_missing(load_spec: LoadSpec) -> None:
    model = tiny()
    model.tensors = {name: values for name, values in model.tensors.items() if not name.startswith("blk.2.")}
    with pytest.raises(InconsistentError, match=r"blk\.2\.ssm_a"):
        load_spec(model)


def test_gg11_unknown_tensors(tmp_path: Path, load_spec: LoadSpec) -> None:
    """Ignored and reported if they belong to something else, refused if they would change the result."""
    model = tiny()
    extra = np.zeros(32, np.float32)
    model.tensors |= {
        "v.blk.0.ln1.weight": extra,
        "mm.0.weight": extra,
        "mtp.norm.weight": extra,
        "blkx": extra,
    }
    with GGUFFile.open(write_model(tmp_path / "extra.gguf", model)[0]) as file:
        spec = read_spec(file.metadata, file.tensors)
        ignored = validate_tensors(spec, file.tensors)
    assert ignored == ("v.blk.0.ln1.weight", "mm.0.weight", "mtp.norm.weight", "blkx")

    for name in ("blk.0.attn_norm.bias", "blk.3.attn_q.bias", "blk.1.ffn_gate.weight"):
        model = tiny()
        model.tensors[name] = extra
        with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")):
            load_spec(model)
    model = tiny()
    model.tensors["blk.4.attn_norm.weight"] = extra
    with pytest.raises(InconsistentError, match=r"blk\.4\.attn_norm\.weight .* outside the 4 blocks"):
        load_spec(model)


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_fused_tensors(load_spec: LoadSpec, arch: str) -> None:
    fused = load_spec(tiny(arch, fused_experts=True, fused_attention=True, nextn=True))
    assert fused == load_spec(tiny(arch, nextn=True))


def test_gg11_fused_and_split_at_once(load_spec: LoadSpec) -> None:
    model = tiny()
    fused = tiny(fused_experts=True)
    model.tensors["blk.1.ffn_gate_up_exps.weight"] = fused.tensors["blk.1.ffn_gate_up_exps.weight"]
    with pytest.raises(
        InconsistentError, match=r"both blk\.1\.ffn_gate_exps\.weight and blk\.1\.ffn_gate_up_exps"
    ):
        load_spec(model)


def test_shared_expert_gate_as_a_matrix_of_one_row(load_spec: LoadSpec) -> None:
    model = tiny()
    for name in list(model.tensors):
        if name.endswith("ffn_gate_inp_shexp.weight"):
            model.tensors[name] = model.tensors[name].reshape(1, -1)
    assert load_spec(model) == load_spec(tiny())


def test_mtp_block_with_its_own_tables(load_spec: LoadSpec) -> None:
    model = tiny(nextn=True)
    model.tensors["blk.4.nextn.embed_tokens.weight"] = model.tensors["token_embd.weight"]
    model.tensors["blk.4.nextn.shared_head_head.weight"] = model.tensors["output.weight"]
    assert load_spec(model) == load_spec(tiny(nextn=True))
    model.tensors["blk.4.nextn.embed_tokens.weight"] = np.zeros((8, 32), np.float32)
    with pytest.raises(InconsistentError, match=r"blk\.4\.nextn\.embed_tokens\.weight"):
        load_spec(model)


def test_mtp_block_without_a_norm_of_its_own(load_spec: LoadSpec) -> None:
    model = tiny(nextn=True)
    del model.tensors["blk.4.nextn.shared_head_norm.weight"]
    assert load_spec(model) == load_spec(tiny(nextn=True))


@pytest.mark.parametrize("type_name", ["BF16", "F16", "Q8_0", "Q4_0"])
def test_small_tensors_of_any_type(tmp_path: Path, type_name: str) -> None:
    types = {"*.ffn_gate_inp*": type_name, "*.ssm_alpha.weight": type_name, "*.attn_norm.weight": type_name}
    with GGUFFile.open(write_model(tmp_path / "small.gguf", tiny(types=types))[0]) as file:
        read_spec(file.metadata, file.tensors)
        for name in (
            "ffn_gate_inp.weight",
            "ffn_gate_inp_shexp.weight",
            "ssm_alpha.weight",
            "attn_norm.weight",
        ):
            assert file.tensors[f"blk.0.{name}"].quant_type is QuantType[type_name]


@pytest.mark.parametrize("suffix", ["scale", "input_scale"])
def test_nvfp4_side_tensors(load_spec: LoadSpec, suffix: str) -> None:
    model = tiny()
    model.tensors[f"blk.0.ffn_down_exps.{suffix}"] = np.ones(4, np.float32)
    with pytest.raises(UnsupportedError, match=r"scales blk\.0\.ffn_down_exps\.weight \(an NVFP4 file\)"):
        load_spec(model)


def test_no_tensors_at_all(load_spec: LoadSpec) -> None:
    model = tiny()
    model.tensors.clear()
    with pytest.raises(InconsistentError, match=r"token_embd\.weight is missing"):
        load_spec(model)


@pytest.mark.parametrize(
    "name",
    [
        "rope_freqs.weight",
        "rope_factors_long.weight",
        "output.bias",
        "output_norm.bias",
        "token_embd_norm.weight",
    ],
)
def test_a_tensor_of_the_text_that_nothing_reads_is_refused(load_spec: LoadSpec, name: str) -> None:
    model = tiny()
    model.tensors[name] = np.ones(2, np.float32)
    with pytest.raises(
        UnsupportedError, match=rf"the tensor {name} \(data .*no known meaning in a qwen35moe"
    ):
        load_spec(model)
