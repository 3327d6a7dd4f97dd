"""Qwen3.8-Flash-Next against `transformers`, and llama.cpp in texts that its indexer leaves whole."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from bench.runners import open_cpu_runner, open_model_file
from builders import SMALL, Dims, TinyModel, make_model, write_model
from coldstream.errors import InconsistentError, ModelChangedError, TruncatedError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ngram import NGRAM_CACHE_BYTES
from coldstream.models import ModelSpec, block_tensors, global_tensors
from coldstream.models.cuda.memory_plan import check_supported
from coldstream.models.footprint import dense_bytes, ngram_cache_bytes, trunk_bytes
from coldstream.models.spec.layer_specs import HyperConnectionSpec, IndexerSpec
from convert_hf import Variant, convert
from gguf import GGMLQuantizationType as Type
from hf_models import NGRAMS, hf_logits, tiny_qwen4exp
from tools import llama_cpp

# A mixture's gates pass on the rounding of four streams: both programs are as far from the float32 result.
AS_ALIKE = {"least": 0.92, "least_of_clear": 0.97}
FUSED = Variant(fused_experts=True, shared_gate_as_matrix=True)
# Rows of 160 and 96 values are no whole blocks of 256.
MIXED_TYPES = {**K_TYPES, "ffn_down_exps": Type.Q8_0, "ffn_down_shexp": Type.Q8_0}
# Keys that others imply, or of which files without them run in part.
IMPLIED = {
    f"qwen4exp.{name}"
    for name in (
        "attention.value_length", "rope.dimension_sections", "ssm.inner_size", "full_attention_interval",
        "nextn_predict_layers", "attention.compress_ratios",
    )
}  # fmt: skip
MIXED_TYPES |= {f"{part}_up": Type.Q5_0 for part in ("hc_attn", "hc_ffn", "output_hc")}


@functools.cache
def hf_model(value_heads: int = 6) -> PreTrainedModel:
    return tiny_qwen4exp(linear_num_value_heads=value_heads)


@functools.cache
def hf_ngrams() -> PreTrainedModel:
    return tiny_qwen4exp(**NGRAMS)


def ids_with_ends(count: int) -> list[int]:
    """Tokens behind which n-grams begin anew, also two of them side by side."""
    ids = random_ids(count)
    for place in (0, 40, 41, 60, 62):
        ids[place] = NGRAMS["eos_token_id"]
    return ids


@pytest.mark.sharded(4)
@pytest.mark.parametrize("variant", [Variant(), FUSED], ids=["apart", "fused"])
@pytest.mark.parametrize("value_heads", [2, 6])
def test_logits_equal_transformers(value_heads: int, variant: Variant, tmp_path: Path) -> None:
    """At the last position that its indexer does not shorten; 131 tokens are two chunks of the DeltaNet."""
    ids, model = random_ids(131), hf_model(value_heads)
    path = convert(model, tmp_path / "model.gguf", variant)
    expected = hf_logits(model, ids).numpy()
    assert expected.std() > 1
    assert np.abs(cpu_logits(path, ids, "f32") - expected).max() < 1e-4


@pytest.mark.sharded
def test_logits_equal_llama_cpp(tmp_path: Path) -> None:
    ids = random_ids(100)
    path = convert(hf_model(), tmp_path / "model.gguf")
    assert np.abs(cpu_logits(path, ids, "f32") - llama_cpp.logits(path, ids)).max() < 1e-4


@pytest.mark.sharded(2)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_with_ngrams_equal_transformers_and_llama_cpp(seed: int, tmp_path: Path) -> None:
    """Both read the table in the file; rows are read before the layer that they enter."""
    ids, model = ids_with_ends(120 + seed), hf_ngrams()
    path = convert(model, tmp_path / "model.gguf", Variant({"per_layer_token_embd": Type.F16}))
    found, expected = cpu_logits(path, ids, "f32"), hf_logits(model, ids).numpy()
    assert expected.std() > 1
    assert np.abs(found - llama_cpp.logits(path, ids)).max() < 1e-3
    path = convert(model, tmp_path / "f32.gguf")
    assert np.abs(cpu_logits(path, ids, "f32") - expected).max() < 1e-4


@pytest.mark.sharded
@pytest.mark.parametrize(("budget", "block_size"), [(16, 4), (32, 8), (8, 4)])
def test_texts_beyond_the_choice_of_the_indexer_equal_transformers(
    budget: int, block_size: int, tmp_path: Path
) -> None:
    """From where it leaves blocks out, which changes the logits of every later token."""
    ids = random_ids(90)
    model = tiny_qwen4exp(indexer_budget=budget, indexer_compress_ratio=block_size)
    whole = tiny_qwen4exp(indexer_budget=256)
    path = convert(model, tmp_path / "model.gguf")
    expected, seeing_all = (hf_logits(each, ids).numpy() for each in (model, whole))
    assert np.abs(cpu_logits(path, ids, "f32") - expected).max() < 1e-4
    first = budget + block_size - 1
    assert np.abs(seeing_all - expected)[:first].max() < 1e-4
    assert np.abs(seeing_all - expected)[first:].max(axis=1).min() > 1e-3


@pytest.mark.sharded
def test_a_quantised_file_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    model = tiny_qwen4exp(indexer_budget=2048, linear_num_value_heads=4)
    path = convert(model, tmp_path / "model.gguf", Variant(MIXED_TYPES))
    assert_chooses_like_llama_cpp(path, **AS_ALIKE)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [Variant(), FUSED], ids=["apart", "fused"])
def test_logits_of_a_gpu_equal_transformers(variant: Variant, tmp_path: Path) -> None:
    ids, model = random_ids(131), hf_model()
    path = convert(model, tmp_path / "model.gguf", variant)
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy())


@pytest.mark.gpu
def test_logits_of_a_gpu_with_ngrams_equal_transformers(tmp_path: Path) -> None:
    ids, model = ids_with_ends(131), hf_ngrams()
    path = convert(model, tmp_path / "model.gguf")
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy())


@pytest.mark.gpu
@pytest.mark.parametrize(("budget", "block_size"), [(16, 4), (32, 8)])
def test_logits_of_a_gpu_beyond_the_choice_of_the_indexer_equal_transformers(
    budget: int, block_size: int, tmp_path: Path
) -> None:
    """Of a prompt in which no two blocks are so near that rounded keys choose the other one."""
    ids, model = random_ids(94), tiny_qwen4exp(indexer_budget=budget, indexer_compress_ratio=block_size)
    path = convert(model, tmp_path / "model.gguf")
    assert_gpu_equals(path, ids, hf_logits(model, ids).numpy())


@pytest.mark.gpu
def test_a_gpu_chooses_the_tokens_that_llama_cpp_chooses(tmp_path: Path) -> None:
    model = tiny_qwen4exp(indexer_budget=2048, linear_num_value_heads=4)
    path = convert(model, tmp_path / "model.gguf", Variant(MIXED_TYPES))
    assert_chooses_like_llama_cpp(path, gpu_logits, **AS_ALIKE)


def tiny(**options: bool) -> TinyModel:
    return make_model("qwen4exp", dims=SMALL, quant="F32", tokenizer=False, **options)


def key(model: TinyModel, name: str, value: object) -> TinyModel:
    model.metadata[f"qwen4exp.{name}"] = value
    return model


def test_the_spec_of_a_file(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    spec = spec_of(tiny())
    assert spec.layer_kinds == ("delta_net", "delta_net", "delta_net", "attention")
    assert spec.hyper_connections == HyperConnectionSpec(num_streams=4, rank=16)
    assert spec.indexer == IndexerSpec(num_heads=2, head_dim=8, top_k=2048, block_size=4)
    assert (spec.attentions[0].output_gate, spec.moe.shared) == ("query", "gated")
    assert (spec.delta_net.output_gate, spec.delta_net.value_heads_grouped) == ("sigmoid", False)
    assert spec_of(tiny(nextn=True)).num_nextn_layers == 1


def test_short_texts_need_no_indexer(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    spec = spec_of(tiny())
    assert (spec.context_length, spec.is_indexed, spec.index_dim, spec.warnings) == (4096, True, 8, ())
    assert (spec.for_context(2052).index_dim, spec.for_context(2051).index_dim) == (8, 0)
    short = spec_of(key(tiny(), "context_length", 2000))
    assert (short.context_length, short.is_indexed, short.warnings) == (2000, False, ())
    assert short.context_bound == "the model was trained for"


def test_drafts_need_no_indexer(spec_of: Callable[[TinyModel], ModelSpec], tmp_path: Path) -> None:
    """The block for multi-token prediction attends to all positions, and keeps keys and values alone."""
    spec = spec_of(tiny(nextn=True))
    assert (spec.nextn.indexer, spec.nextn.index_dim, spec.index_dim) == (None, 0, 8)
    (path,) = write_model(tmp_path / "long.gguf", make_model("qwen4exp", nextn=True, dims=Dims(top_k=16)))
    with open_cpu_runner(path, threads=2, context_length=64) as runner:
        assert runner.spec.is_indexed
        mtp = runner.load_mtp()
        assert all(layer.index is None for layer in mtp._sequences.tensors.layers)


def test_indexers_without_a_gpu_kernel_are_refused(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    spec = spec_of(make_model("qwen4exp", quant="F32", tokenizer=False))
    check_supported(spec)
    for changes, message in (
        (
            {"indexer": replace(spec.indexer, head_dim=136)},
            "an indexer's heads of 136: multiples of 8 up to 128",
        ),
        ({"window": 60}, "an indexer beside a window"),
    ):
        layers = [
            replace(layer, mixer=replace(layer.mixer, **changes)) if kind == "attention" else layer
            for layer, kind in zip(spec.layers, spec.layer_kinds, strict=True)
        ]
        with pytest.raises(UnsupportedError, match=f"no GPU kernels for {message}"):
            check_supported(replace(spec, layers=tuple(layers)))


@pytest.mark.parametrize("sizes", [[0, 0, 0, 0], None], ids=["zeros", "absent"])
def test_block_sizes_that_a_converter_lost_are_noticed(
    sizes: list[int] | None, spec_of: Callable[[TinyModel], ModelSpec]
) -> None:
    """A text has as many positions as whole blocks of any size may have."""
    model = key(tiny(), "attention.compress_ratios", sizes)
    if sizes is None:
        del model.metadata["qwen4exp.attention.compress_ratios"]
    spec = spec_of(model)
    assert spec.context_length == 2048
    assert not spec.is_indexed
    (warning,) = spec.warnings
    assert "at most 2048 tokens" in warning
    assert "compress_ratios has to describe and the converter lost: convert" in warning


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("ple.layers", [1, 2], UnsupportedError, r"\[1, 2\], supported: n-grams before one layer"),
        ("ple.layers", [0], UnsupportedError, r"0, supported: n-grams before a layer after the first"),
        ("ple.layers", [3], InconsistentError, r"layer 3 attends"),
        ("ple.layers", [], InconsistentError, r"names no layer, but the file has the tensor per_layer"),
        ("ple.head_offsets", [0, 97, 198], InconsistentError, r"3 numbers, expected 4"),
        ("ple.head_vocab_sizes", [97, 0, 1, 1], InconsistentError, r"0 rows from 97 on"),
        ("ple.head_vocab_sizes", [97, 101, 103, 400], InconsistentError, r"\[701 or more, 8\]"),
        ("ple.conv_kernel", 7, UnsupportedError, r"7 rows, 3 rows apart each, supported: up to 16 rows back"),
        ("rope.dimension_sections", [1, 0, 0, 1], UnsupportedError, r"the pair 1 of 2 to a fourth stream"),
        ("hyper_connection.count", 1, InconsistentError, r"hyper_connection\.count"),
        ("attention.indexer.top_k", 2050, InconsistentError, r"2050 positions are no whole blocks of 4"),
        ("attention.compress_ratios", [4, 0, 0, 8], UnsupportedError, r"compress_ratios.*differs between"),
        (
            "attention.compress_ratios",
            [0, 0, 0, 2],
            UnsupportedError,
            r"2\], .*supported: blocks of 4, 8, 16, 32",
        ),
        ("attention.indexer.key_length", 2, UnsupportedError, r"2, supported: at least the 4 dimensions"),
    ],
)
def test_what_is_refused(
    name: str,
    value: object,
    error: type[Exception],
    message: str,
    spec_of: Callable[[TinyModel], ModelSpec],
) -> None:
    with pytest.raises(error, match=message):
        spec_of(key(tiny(ngrams=True), name, value))


def keys_of(model: TinyModel) -> list[str]:
    """Those of the family."""
    return [name for name in model.metadata if name.startswith("qwen4exp.")]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_lacks_keys_says_which(
    data: st.DataObject, spec_of: Callable[[TinyModel], ModelSpec]
) -> None:
    """One or half of them. What others imply may be left out, or is noticed."""
    model = tiny(ngrams=True, nextn=True)
    names = keys_of(model)
    lost = data.draw(
        st.one_of(
            st.sampled_from(names).map(lambda name: [name]),
            st.sampled_from([names[::2], names[1::2], [name for name in names if ".ple." in name]]),
            st.lists(st.sampled_from(names), min_size=len(names) // 2, unique=True),
        )
    )
    for name in lost:
        del model.metadata[name]
    if set(lost) <= IMPLIED:
        spec = spec_of(model)
        assert bool(spec.warnings) == ("qwen4exp.attention.compress_ratios" in lost)
        return
    with pytest.raises(InconsistentError) as caught:
        spec_of(model)
    assert any(f" {name}: " in str(caught.value) for name in lost)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", [1, 10_000])
def test_a_table_that_ends_early_is_an_error(lost: int, tmp_path: Path) -> None:
    model = tiny(ngrams=True)
    table = "per_layer_token_embd.weight"
    model.tensors[table] = model.tensors.pop(table)  # the file's end
    (path,) = write_model(tmp_path / "tiny.gguf", model)
    os.truncate(path, path.stat().st_size - lost)
    with pytest.raises(
        TruncatedError, match=r"per_layer_token_embd.*the file is incomplete, download it again"
    ):
        GGUFFile.open(path)


@pytest.mark.sharded(of="models on the CPU")
def test_every_tensor_is_required(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    check_every_tensor_is_required(tiny(nextn=True, ngrams=True), spec_of)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_norm.weight", "output_norm.weight", "per_layer_model_proj.weight"]
)
def test_tensors_of_other_families_are_refused(name: str, spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    model = tiny()
    model.tensors[name] = np.ones(SMALL.hidden, np.float32)
    with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")):
        spec_of(model)


def test_tensors_of_published_files(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    """36 layers with a DeltaNet and 12 that attend have 1,224 tensors with the n-gram table, as published."""
    spec = spec_of(tiny(ngrams=True))
    first, with_ngrams, _, last, beside = (
        sum(len(requirement[0]) for requirement in requirements)
        for requirements in (*(block_tensors(spec, layer) for layer in range(4)), global_tensors(spec))
    )
    table = 1
    assert 35 * first + with_ngrams + 12 * last + beside + table == 1224


def test_norms_that_lack_their_one_are_noticed(tmp_path: Path) -> None:
    model = tiny()
    for layer in range(SMALL.layers):
        model.tensors[f"blk.{layer}.hc_attn_norm.weight"] -= 1
    write_model(tmp_path / "tiny.gguf", model)
    with open_cpu_runner(tmp_path / "tiny.gguf", threads=1, context_length=8, kv_type="f32") as runner:
        assert [each for each in runner.warnings if "hc_attn_norm weights are centred on" in each]


def test_ngrams_without_a_gpu_kernel_are_refused(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    spec = spec_of(make_model("qwen4exp", quant="F32", tokenizer=False, ngrams=True))
    check_supported(spec)
    assert spec.ngram is not None
    assert spec.ngram_layer is not None
    sizes = tuple(range(1, 202))
    for wrong, message in (
        (replace(spec.ngram, columns=33), "n-grams of 132 values together: multiples of 8"),
        (
            replace(spec.ngram, hashing=replace(spec.ngram.hashing, sizes=sizes), columns=8),
            "n-grams of 201 heads: at most 192",
        ),
    ):
        layers = list(spec.layers)
        layers[spec.ngram_layer] = replace(layers[spec.ngram_layer], ngram=wrong)
        with pytest.raises(UnsupportedError, match=f"no GPU kernels for {message} are supported"):
            check_supported(replace(spec, layers=tuple(layers)))


def test_the_table_of_ngrams_is_in_no_sum_of_memory(tmp_path: Path) -> None:
    """But for the rows that a CPU keeps, which are bounded; a published table has 27 GiB."""
    plain, with_ngrams = (
        write_model(tmp_path / f"{flag}.gguf", make_model("qwen4exp", ngrams=flag))[0]
        for flag in (False, True)
    )
    (file, spec), (more, wide) = open_model_file(plain), open_model_file(with_ngrams)
    with file, more:
        table = more.tensors["per_layer_token_embd.weight"].num_bytes
        entering = sum(info.num_bytes for name, info in more.tensors.items() if ".ple_" in name)
        assert dense_bytes(wide, more.tensors) == dense_bytes(spec, file.tensors) + entering
        assert trunk_bytes(wide, more.tensors) == trunk_bytes(spec, file.tensors) + entering
        assert ngram_cache_bytes(spec, file.tensors) == 0
        assert ngram_cache_bytes(wide, more.tensors) == table
        huge = replace(more.tensors["per_layer_token_embd.weight"], num_bytes=1 << 35)
        tensors = {**more.tensors, huge.name: huge}
        assert ngram_cache_bytes(wide, tensors) == NGRAM_CACHE_BYTES


@pytest.mark.sharded(of="models on the CPU")
def test_fl01_a_table_that_shrinks_is_an_error(tmp_path: Path) -> None:
    """Also where nothing else of the file is missed."""
    model = make_model("qwen4exp", ngrams=True, types={"per_layer_*": "F32"})
    model.tensors["per_layer_token_embd.weight"] = model.tensors.pop("per_layer_token_embd.weight")  # last
    (path,) = write_model(tmp_path / "tiny.gguf", model)
    with open_cpu_runner(path, threads=2, context_length=64) as runner:
        os.truncate(path, path.stat().st_size - 300 * 4 * 64)
        with pytest.raises(ModelChangedError, match=r"tiny\.gguf"):
            runner.logits(random_ids(60))


def test_streams_without_a_gpu_kernel_are_refused(spec_of: Callable[[TinyModel], ModelSpec]) -> None:
    spec = spec_of(make_model("qwen4exp", quant="F32", tokenizer=False))
    check_supported(spec)
    with pytest.raises(UnsupportedError, match="4 residual streams of 4096 values: up to 8, 12288 values"):
        check_supported(replace(spec, hidden_size=4096))
