"""The full-size benchmark file: its types are the real ones, its text walks, and no layer writes the code."""

import argparse
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gguf
from bench.engine.gpu import WALK_TOKENS, check_walk
from bench.engine.routing_locality import (
    PUBLISHED_UNIONS,
    RoutingReader,
    interleaved,
    lru_hit_rate,
    next_token_reuse,
    union,
)
from bench.full_size_mixes import MIXES, PLAIN, Mix, Rule, UnknownTypeError, mix_named
from bench.full_size_model import (
    APART,
    CODE,
    DENSE_SHAPE,
    FULL_SHAPE,
    LIKE_NEIGHBOURS,
    POPULAR_SHARE,
    PROTECTED,
    CodeShares,
    FullSizeWriter,
    token_levels,
)
from bench.level_blocks import level_blocks
from bench.random_model import Shape
from coldstream.engine import LLM
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import RoutingCpuOps
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec
from small_shape import SMALL


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    FullSizeWriter(path, SMALL, seed=3, threads=2).write()
    return path


@pytest.fixture(scope="module")
def tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def of_published_size(shape: Shape, mix: Mix = PLAIN) -> tuple[Counter[str], int]:
    """Tensors by type, and their bytes with the whole vocabulary."""
    writer = FullSizeWriter(Path("unwritten.gguf"), replace(shape, vocab=512), seed=0, threads=1, mix=mix)
    writer.plan()
    tables = {"token_embd.weight", "output.weight"}
    num_bytes = sum(
        tensor.num_bytes * (shape.vocab // 512 if tensor.name in tables else 1) for tensor in writer.tensors
    )
    return Counter(tensor.qtype.name for tensor in writer.tensors), num_bytes


@pytest.mark.sharded(of="measurements")
def test_a_file_for_plans_has_holes_for_quantised_weights_only(path: Path, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse.gguf"
    FullSizeWriter(sparse, SMALL, seed=3, threads=2).write(is_for_plans=True)
    assert sparse.stat().st_size == path.stat().st_size
    whole = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in gguf.GGUFReader(sparse).tensors:
        other = whole.pop(tensor.name)
        assert (tensor.tensor_type, tensor.data_offset) == (other.tensor_type, other.data_offset)
        is_float = tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert np.array_equal(tensor.data, other.data if is_float else np.zeros_like(other.data))
    assert not whole


@pytest.mark.sharded(of="measurements")
def test_types_and_size_are_those_of_published_files() -> None:
    counts, num_bytes = of_published_size(FULL_SHAPE)
    assert counts == {"F32": 301, "Q4_K": 355, "Q5_K": 30, "Q6_K": 47}
    assert round(num_bytes / 2**30, 1) == 19.7


# Bytes of published files with the types' counts that come of their rules.
MIX_SIZES = {
    "UD-Q4_K_XL": (22.4e9, {"F32": 361, "Q4_K": 78, "Q5_K": 38, "Q6_K": 4, "Q8_0": 252}),
    "UD-IQ3_S": (12.73 * 2**30, {"F32": 361, "IQ2_S": 80, "IQ3_S": 40, "Q6_K": 252}),
    "APEX-Quality": (21.3 * 2**30, {"F32": 301, "IQ4_XS": 60, "Q5_K": 30, "Q6_K": 222, "Q8_0": 120}),
    "APEX-Nano": (
        10.88 * 2**30,
        {"F32": 301, "IQ2_XXS": 60, "IQ2_S": 30, "Q3_K": 191, "Q4_K": 120, "Q5_K": 30, "Q6_K": 1},
    ),
}


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize("name", MIX_SIZES)
def test_mixes_have_the_size_of_published_files(name: str) -> None:
    published, expected = MIX_SIZES[name]
    counts, num_bytes = of_published_size(FULL_SHAPE, MIXES[name])
    assert counts == expected
    assert num_bytes == pytest.approx(published, rel=0.01)


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("IQ4_XS", {"IQ4_XS": 421, "Q5_K": 10, "Q6_K": 1}),
        ("Q2_K", {"Q2_K": 331, "Q3_K": 90, "Q4_K": 10, "Q6_K": 1}),
        ("MXFP4", {"MXFP4": 120, "Q8_0": 312}),
        ("Q2_0", {"Q2_0": 430, "Q4_K": 1, "Q6_K": 1}),
    ],
)
def test_plain_mixes_follow_the_rules_of_llama_quantize(name: str, expected: dict[str, int]) -> None:
    writer = FullSizeWriter(Path("unwritten.gguf"), replace(FULL_SHAPE, vocab=512), seed=0, threads=1)
    writer.plan()
    counts: Counter[str] = Counter()
    for tensor in writer.tensors:
        if tensor.qtype != QuantType.F32:
            *layer, matrix, _ = tensor.name.removeprefix("blk.").split(".")
            counts[MIXES[name].type_name_of(matrix, int(layer[0]) if layer else 0, FULL_SHAPE.layers)] += 1
    assert counts == expected


def test_a_mix_with_an_unknown_type_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = Mix("odd", 0, "nowhere", (Rule("ffn_*", "Q9_9"), Rule("*", "Q8_0")))
    monkeypatch.setitem(MIXES, "odd", mix)
    with pytest.raises(argparse.ArgumentTypeError, match="mix odd has tensors in Q9_9, which this version"):
        mix_named("odd")
    with pytest.raises(UnknownTypeError, match="mix odd has ffn_gate_inp in Q9_9"):
        mix.type_of("ffn_gate_inp", 0, 4)
    with pytest.raises(argparse.ArgumentTypeError, match="no mix 'Q4': there are Q4_K_M, UD-Q4_K_XL"):
        mix_named("Q4")
    assert mix_named("Q2_K") is MIXES["Q2_K"]


@pytest.mark.sharded(6)
@pytest.mark.parametrize("mix", [mix for mix in MIXES.values() if not mix.unknown_types and mix != PLAIN])
def test_text_of_every_mix_walks_too(mix: Mix, tmp_path: Path) -> None:
    path = tmp_path / "mix.gguf"
    FullSizeWriter(path, SMALL, seed=3, threads=2, mix=mix).write()
    with GGUFFile.open(path) as file:
        assert file.metadata["general.file_type"] == mix.file_type
        types = {name: tensor.quant_type for name, tensor in file.tensors.items() if "_exps." in name}
    assert types["blk.1.ffn_up_exps.weight"] == mix.type_of("ffn_up_exps", 1, SMALL.layers)
    with LLM(path, device="cpu", ctx_size=2 * WALK_TOKENS) as llm:
        check_walk(llm)


@pytest.mark.sharded(of="measurements")
def test_the_dense_shape_has_the_tensors_and_size_of_published_files() -> None:
    counts, num_bytes = of_published_size(DENSE_SHAPE)
    assert sum(counts.values()) == 851
    assert 15 < num_bytes / 2**30 < 16.5


@pytest.mark.sharded(of="measurements")
def test_dense_text_walks_through_the_vocabulary_too(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    FullSizeWriter(path, replace(SMALL, dense_ffn=768), seed=3, threads=2).write()
    with LLM(path, device="cpu", ctx_size=2 * WALK_TOKENS) as llm:
        assert llm.opened.runner.spec.architecture == "qwen35"
        check_walk(llm)


def test_text_walks_through_the_vocabulary(path: Path) -> None:
    with LLM(path, device="cpu", ctx_size=2 * WALK_TOKENS) as llm:
        check_walk(llm)


@pytest.mark.sharded
@pytest.mark.parametrize("name", ["IQ4_XS", "Q2_K", "UD-IQ3_S", "MXFP4"])
def test_routing_is_as_local_in_every_mix(name: str) -> None:
    rates = [hit_rate_of_codes(mix) for mix in (PLAIN, MIXES[name])]
    assert rates[1] == pytest.approx(rates[0], abs=0.02)


def hit_rate_of_codes(mix: Mix) -> float:
    """Of a cache of a quarter of 256 experts, if 8 are routed by the code that is read from the embedding."""
    shape = replace(SMALL, vocab=6000)
    levels = FullSizeWriter(Path("unwritten.gguf"), shape, seed=1, threads=1, mix=mix).levels
    qtype = mix.type_of("token_embd", 0, shape.layers)
    blocks = torch.from_numpy(level_blocks(qtype, levels, 1.0))
    codes = dequantize(QuantTensor(blocks, qtype, levels.shape)).numpy()[:, :CODE]
    directions = np.random.default_rng(5).standard_normal((256, CODE))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    ids = np.argsort(-(codes @ directions.T), axis=1)[:, :8]
    return float(lru_hit_rate(ids, 64))


@pytest.mark.sharded(of="measurements")
def test_a_wrong_text_is_no_figure(path: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled.gguf"
    writer = FullSizeWriter(shuffled, SMALL, seed=3, threads=2)
    writer.levels = token_levels(np.random.default_rng(1), SMALL.vocab)
    writer.write()
    other = GGUFFile.open(path).tensors["output.weight"]
    with shuffled.open("r+b") as target, path.open("rb") as source:
        source.seek(other.offset)
        target.seek(other.offset)
        target.write(source.read(other.num_bytes))
    with (
        LLM(shuffled, device="cpu", ctx_size=2 * WALK_TOKENS) as llm,
        pytest.raises(RuntimeError, match="not a figure of this model: after 1015 came"),
    ):
        check_walk(llm)


@pytest.mark.sharded(of="measurements")
def test_only_the_embedding_writes_protected_channels(tensors: dict[str, gguf.ReaderTensor]) -> None:
    names = [name for name in tensors if name.split(".")[-2] in ("attn_output", "ssm_out")]
    names += [name for name in tensors if ".ffn_down_" in name]
    assert len(names) == 3 * SMALL.layers
    for name in names:
        matrix = values(tensors[name])
        assert not matrix[..., :PROTECTED, :].any(), name
        assert matrix[..., PROTECTED:, :].any(axis=-1).all(), name


def test_routers_read_the_code_alone(tensors: dict[str, gguf.ReaderTensor]) -> None:
    for layer in range(SMALL.layers):
        router = tensors[f"blk.{layer}.ffn_gate_inp.weight"].data
        assert router[:, :CODE].any(axis=1).all()
        assert not router[:, CODE:].any()


def test_no_two_experts_are_equal(tensors: dict[str, gguf.ReaderTensor]) -> None:
    for name in (name for name in tensors if "_exps." in name):
        assert len({expert.tobytes() for expert in tensors[name].data}) == SMALL.experts


def test_the_head_is_the_signature_of_the_token_before(tensors: dict[str, gguf.ReaderTensor]) -> None:
    embedding, head = values(tensors["token_embd.weight"]), values(tensors["output.weight"])
    signature = slice(CODE, PROTECTED)
    np.testing.assert_array_equal(4 * head[:, signature], np.roll(embedding, 1, axis=0)[:, signature])
    assert not head[:, :CODE].any()


def test_routing_depends_on_the_token_alone(path: Path) -> None:
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        ops = RoutingCpuOps(2)
        reader = RoutingReader(spec, ops, CausalLM.load(file, spec, ops))
    forwards, backwards = (reader.topk_ids(ids) for ids in (range(100, 164), range(163, 99, -1)))
    assert len(forwards) == SMALL.layers
    for one, other in zip(forwards, backwards, strict=True):
        np.testing.assert_array_equal(one, other[::-1])


def floats_of(writer: FullSizeWriter, suffix: str) -> list[np.ndarray]:
    """The float32 tensors of all layers with this name, which `writer` has planned."""
    found = [tensor for tensor in writer.tensors if tensor.name.endswith(suffix)]
    return [next(make())[1]()[0] for make in (tensor.pieces for tensor in found)]


def choices(codes: np.ndarray, norm: np.ndarray, router: np.ndarray, count: int) -> np.ndarray:
    """Whether a router chooses each expert when it reads codes behind a norm: bool [tokens, experts]."""
    logits = (codes * norm[:CODE]) @ router[:, :CODE].T
    return np.asarray(logits >= np.partition(logits, -count, axis=1)[:, -count, None])


def recall_ahead(writer: FullSizeWriter, distance: int) -> float:
    """Share of choices that routers make so many layers before their own."""
    codes = writer.levels[::20, :CODE] - 7.5
    routers, norms = floats_of(writer, "ffn_gate_inp.weight"), floats_of(writer, "post_attention_norm.weight")
    layers = range(distance, len(routers))
    own, guessed = (
        np.array(
            [choices(codes, norms[at - back], routers[at], writer.shape.experts_per_token) for at in layers]
        )
        for back in (0, distance)
    )
    return float((own & guessed).sum() / own.sum())


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize("recall", [0.7, 0.8, 0.9, 1.0])
def test_the_stated_part_of_guesses_is_right(recall: float) -> None:
    """As in a trained model, fewer of those made farther ahead are."""
    shape = replace(SMALL, layers=40, experts=256, experts_per_token=8, vocab=4000)
    writer = FullSizeWriter(Path("unwritten.gguf"), shape, seed=2, threads=1, guess_recall=recall)
    writer.plan()
    one, two, three = (recall_ahead(writer, distance) for distance in (1, 2, 3))
    assert two == pytest.approx(recall, abs=0.02)
    assert one > two > three or recall == 1


def test_guesses_go_wrong_by_norms_alone(path: Path, tmp_path: Path) -> None:
    """The engine's routers choose what the codes behind these norms say; text still walks."""
    other = tmp_path / "guessed.gguf"
    writer = FullSizeWriter(other, SMALL, seed=3, threads=2, guess_recall=0.85)
    writer.write()
    tensors = (
        {tensor.name: tensor.data for tensor in gguf.GGUFReader(each).tensors} for each in (path, other)
    )
    before, after = tensors
    changed = {name for name, data in after.items() if not np.array_equal(data, before[name])}
    assert changed == {f"blk.{layer}.post_attention_norm.weight" for layer in range(SMALL.layers)}
    with GGUFFile.open(other) as file:
        spec = read_spec(file.metadata, file.tensors)
        ops = RoutingCpuOps(2)
        found = RoutingReader(spec, ops, CausalLM.load(file, spec, ops)).topk_ids(range(100, 164))
    routers, norms = floats_of(writer, "ffn_gate_inp.weight"), floats_of(writer, "post_attention_norm.weight")
    for router, norm, ids in zip(routers, norms, found, strict=True):
        chosen = choices(writer.levels[100:164, :CODE] - 7.5, norm, router, SMALL.experts_per_token)
        assert np.take_along_axis(chosen, np.asarray(ids, np.int64), axis=1).all()
    with LLM(other, device="cpu", ctx_size=2 * WALK_TOKENS) as llm:
        check_walk(llm)


@pytest.mark.parametrize("recall", [0.3, 1.1])
def test_a_recall_out_of_reach_is_refused(recall: float) -> None:
    with pytest.raises(ValueError, match="% are right: more than"):
        FullSizeWriter(Path("unwritten.gguf"), SMALL, seed=0, threads=1, guess_recall=recall)


@pytest.mark.sharded(of="measurements")
def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    writer = FullSizeWriter(tmp_path / "small.gguf", SMALL, seed=0, threads=1)
    with pytest.raises(OSError, match=r"needs 0\.0 GB, 0\.0 are free"):
        writer.write()
    assert not list(tmp_path.iterdir())


def test_popular_experts_are_those_of_all_texts() -> None:
    """So interleaved texts need few others, as published of a server's."""
    vocab, directions = 4096, np.random.default_rng(5).standard_normal((256, CODE))

    def interleaved_misses(popular_share: float) -> float:
        levels = token_levels(np.random.default_rng(3), vocab, popular_share=popular_share)
        codes = levels[:, :CODE].astype(float) - 7.5
        ids = np.argsort(-(codes @ directions.T), axis=1)[:, :8]
        return 1 - lru_hit_rate(interleaved([ids[first : first + 256] for first in range(0, vocab, 512)]), 95)

    assert interleaved_misses(0) > 0.3
    assert interleaved_misses(POPULAR_SHARE) < 0.12


def test_neighbours_share_as_many_experts_as_published() -> None:
    """And caches hit as often as in the file where neighbours share fewer."""

    def ids(shares: CodeShares) -> np.ndarray:
        levels = token_levels(np.random.default_rng(3), 4096, shares)
        directions = np.random.default_rng(5).standard_normal((256, CODE))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        return np.argsort(-((levels[:, :CODE] - 7.5) @ directions.T), axis=1)[:, :8]

    apart, alike = ids(APART), ids(LIKE_NEIGHBOURS)
    for count, published in PUBLISHED_UNIONS.items():
        assert union(alike, count) < union(apart, count)
        if count <= 8:
            assert union(alike, count) == pytest.approx(published, rel=0.06)
            assert union(apart, count) > 1.06 * published
    assert lru_hit_rate(alike, 49) == pytest.approx(lru_hit_rate(apart, 49), abs=0.04)


def test_texts_interleaved_get_a_token_each() -> None:
    assert interleaved([np.array([[0, 1], [2, 3]]), np.array([[4, 5], [6, 7]])]).tolist() == [
        [0, 1], [4, 5], [2, 3], [6, 7],
    ]  # fmt: skip


def test_hit_rates_of_a_hand_counted_trace() -> None:
    ids = np.array([[0, 1], [0, 2], [3, 0], [1, 0]])
    assert lru_hit_rate(ids, 2) == 2 / 8
    assert lru_hit_rate(ids, 4) == 4 / 8
    assert next_token_reuse(ids) == 0.5
    assert [union(ids, count) for count in (1, 2, 4)] == [1.0, 1.5, 2.0]
