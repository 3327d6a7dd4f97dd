"""Files of other families: types and sizes as published, text that walks, routers that read a code."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from bench import full_size_model
from bench.engine.gpu import FIRST_ID, WALK_TOKENS, check_walk
from bench.engine.routing_locality import RoutingReader
from bench.family_models import (
    FAMILIES,
    NGRAM,
    PUBLISHED_ROWS,
    FullSizeWriter,
    Qwen4ExpWriter,
    arguments,
    main,
    writer_of,
)
from bench.full_size_mixes import MIXES
from bench.full_size_model import CODE, PROTECTED
from coldstream.engine import LLM
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import RoutingCpuOps
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec
from small_shape import SMALL
from tools import llama_cpp

# Rows of neither are whole blocks of 256, where those of the model aren't.
SMALL_SHAPES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "gpt-oss-20b": {"hidden": 544, "expert_ffn": 288, "heads": 8},
        "gpt-oss-120b": {"hidden": 544, "expert_ffn": 288, "heads": 8, "experts": 128},
        "gemma-4-26B-A4B": {"layers": 6, "hidden": 512, "expert_ffn": 96},
        "Qwen3.8-Flash-Next": {"expert_ffn": 320, "value_heads": 6},
        "Laguna-XS-2.1": {"heads": 64, "head_dim": 128},
    }
)
NGRAM_ROWS = 6000


@contextmanager
def small_pools() -> Iterator[None]:
    """Of random blocks, which take longer to draw than small files to write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_size_model, "POOL_BYTES", 8 << 20)
        yield


def small_writer(name: str, path: Path) -> FullSizeWriter:
    family = FAMILIES[name]
    shape = replace(SMALL, **SMALL_SHAPES[name])
    writer = family.writer(path, shape, seed=3, threads=2, mix=family.mix)
    if isinstance(writer, Qwen4ExpWriter):
        writer.ngram = replace(NGRAM, rows=NGRAM_ROWS)
    return writer


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    with small_pools():
        small_writer(request.param, path).write()
    return path


@pytest.mark.sharded(4)
@pytest.mark.filterwarnings("ignore:a text has at most")
def test_text_walks_through_the_vocabulary(path: Path) -> None:
    with LLM(path, device="cpu", ctx_size=2 * WALK_TOKENS) as llm:
        check_walk(llm)


@pytest.mark.sharded(4)
def test_llama_cpp_opens_them_and_walks_too(path: Path) -> None:
    ids = np.arange(FIRST_ID, FIRST_ID + WALK_TOKENS)
    assert np.array_equal(llama_cpp.logits(path, ids.tolist()).argmax(axis=-1), ids + 1)


@pytest.mark.sharded(4)
def test_routing_depends_on_the_token_alone(path: Path) -> None:
    """Even where it differs from token to token."""
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        ops = RoutingCpuOps(2)
        reader = RoutingReader(spec, ops, CausalLM.load(file, spec, ops))
    ids = range(FIRST_ID, FIRST_ID + 48)
    forwards, backwards = reader.topk_ids(ids), reader.topk_ids(ids[::-1])
    assert len(forwards) >= 3
    for one, other in zip(forwards, backwards, strict=True):
        np.testing.assert_array_equal(np.sort(one), np.sort(other[::-1]))
        assert len(np.unique(np.sort(one), axis=0)) > 4


@pytest.mark.parametrize("name", FAMILIES)
def test_biases_leave_the_protected_channels(name: str) -> None:
    writer = small_writer(name, Path("unwritten.gguf"))
    with small_pools():
        writer.plan()
    found = [t for t in writer.tensors if t.name.endswith(("attn_output.bias", "ffn_down_exps.bias"))]
    assert len(found) == (2 * SMALL.layers if name.startswith("gpt-oss") else 0)
    for tensor in found:
        (values,) = next(tensor.pieces())[1]()
        assert not values[..., :PROTECTED].any()
        assert values[..., PROTECTED:].all()


def planned(*words: str) -> FullSizeWriter:
    """The writer of a command line, with a short vocabulary."""
    writer = writer_of(arguments().parse_args([words[0], "unwritten.gguf", "--vocab", "512", *words[1:]]))
    writer.plan()
    return writer


def weights(writer: FullSizeWriter, vocab: int) -> tuple[int, int]:
    """How many weights all matrices and tables have, and their bytes, with a vocabulary of that size."""
    tables = {"token_embd.weight", "output.weight"}
    count, num_bytes = 0, 0
    for tensor in writer.tensors:
        times = vocab // 512 if tensor.name in tables else 1
        count += times * int(np.prod(tensor.dims))
        num_bytes += times * tensor.num_bytes
    return count, num_bytes


PUBLISHED = [
    ("gpt-oss-20b", {"MXFP4": 72, "Q8_0": 98, "F32": 289}, 20.9e9, 11.27),
    ("gpt-oss-120b", {"MXFP4": 108, "Q8_0": 146, "F32": 433}, 116.8e9, 59.0),
]


@pytest.mark.sharded
@pytest.mark.parametrize(("name", "types", "count", "gib"), PUBLISHED)
def test_gpt_oss_has_the_types_and_sizes_of_published_files(
    name: str, types: dict[str, int], count: float, gib: float
) -> None:
    writer = planned(name)
    assert Counter(tensor.qtype.name for tensor in writer.tensors) == types
    found, num_bytes = weights(writer, FAMILIES[name].shape.vocab)
    assert found == pytest.approx(count, rel=0.005)
    assert num_bytes / 2**30 == pytest.approx(gib, rel=0.01)


@pytest.mark.sharded
def test_gemma_has_as_many_weights_as_published() -> None:
    """Beside its head, which is the embedding in published files."""
    name = "gemma-4-26B-A4B"
    writer = planned(name)
    found, _ = weights(writer, FAMILIES[name].shape.vocab)
    assert found - 262144 * 2816 == pytest.approx(25.2e9, rel=0.01)


@pytest.mark.parametrize("mix", ["Q4_K_M", "UD-IQ3_S"])
def test_gates_and_ups_of_gemmas_experts_are_one_tensor(mix: str) -> None:
    """As in published files; ik_llama.cpp reads no others."""
    tensors = {
        tensor.name: tensor for tensor in planned("gemma-4-26B-A4B", "--layers", "1", "--mix", mix).tensors
    }
    assert {name for name in tensors if "_exps.weight" in name} == {
        "blk.0.ffn_gate_up_exps.weight",
        "blk.0.ffn_down_exps.weight",
    }
    fused = tensors["blk.0.ffn_gate_up_exps.weight"]
    assert fused.dims == (128, 2 * 704, 2816)
    assert fused.qtype == QuantType["Q4_K" if mix == "Q4_K_M" else "IQ2_S"]


@pytest.mark.sharded
def test_flash_next_has_as_many_weights_as_published() -> None:
    name = "Qwen3.8-Flash-Next"
    writer = planned(name)
    found, _ = weights(writer, FAMILIES[name].shape.vocab)
    (table,) = (tensor for tensor in writer.tensors if tensor.name == "per_layer_token_embd.weight")
    in_table = int(np.prod(table.dims))
    assert in_table == pytest.approx(51.2e9, rel=0.001)
    assert found - in_table == pytest.approx(125.7e9, rel=0.01)


@pytest.mark.sharded
def test_rows_that_are_no_whole_blocks_have_the_type_that_llama_quantize_takes() -> None:
    writer = planned("Qwen3.8-Flash-Next", "--layers", "4", "--mix", "IQ3_S-experts")
    types = {tensor.name: tensor.qtype for tensor in writer.tensors}
    assert types["blk.0.ffn_up_exps.weight"] == QuantType.IQ3_S
    assert types["blk.0.ffn_down_exps.weight"] == QuantType.IQ4_NL
    assert types["blk.0.hc_ffn_up.weight"] == QuantType.Q8_0
    assert types["per_layer_token_embd.weight"] == QuantType.Q5_0


@pytest.mark.sharded
def test_the_whole_table_of_n_grams_takes_no_place(tmp_path: Path) -> None:
    """Though it is there, with as many rows as published."""
    path = tmp_path / "hole.gguf"
    writer = small_writer("Qwen3.8-Flash-Next", path)
    assert isinstance(writer, Qwen4ExpWriter)
    writer.ngram = NGRAM
    with small_pools():
        writer.write()
    with GGUFFile.open(path) as file:
        info = file.tensors["per_layer_token_embd.weight"]
        assert read_spec(file.metadata, file.tensors).ngram is not None
    assert info.shape == (PUBLISHED_ROWS, 32)
    assert path.stat().st_size > 7e9
    assert path.stat().st_blocks * 512 < 1e8


@pytest.mark.sharded
def test_a_command_line_may_ask_for_fewer_of_all(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [str(tmp_path / "small.gguf"), "--layers", "1", "--vocab", "400"]
    assert main(["gpt-oss-20b", *words, "--mix", "MXFP4"]) == 0
    assert "small.gguf: 0.4" in capsys.readouterr().out
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        spec = read_spec(file.metadata, file.tensors)
    assert (spec.num_layers, spec.vocab_size) == (1, 400)
    none = planned("Qwen3.8-Flash-Next", "--layers", "2", "--ngram-rows", "0")
    assert not any("ple" in tensor.name or "per_layer" in tensor.name for tensor in none.tensors)
    assert none.mix == MIXES["Q2_0-experts"]


def test_gains_of_guesses_reach_the_norms_in_front_of_routers() -> None:
    for name, suffix in (("gpt-oss-20b", "post_attention_norm"), ("Qwen3.8-Flash-Next", "hc_ffn_norm")):
        family, shape = FAMILIES[name], replace(SMALL, **SMALL_SHAPES[name])
        writer = family.writer(Path("unwritten.gguf"), shape, 3, 1, mix=family.mix, guess_recall=0.85)
        with small_pools():
            writer.plan()
        (norm,) = (t for t in writer.tensors if t.name == f"blk.2.{suffix}.weight")
        (values,) = next(norm.pieces())[1]()
        np.testing.assert_allclose(values[:CODE], writer.gains[2], rtol=1e-6)
