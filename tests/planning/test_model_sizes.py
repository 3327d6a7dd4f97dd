"""Sizes of a model for placement, against sums written out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from builders import Dims, MixedAttention, write_gguf
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kvcache.cache import kv_token_bytes
from coldstream.models.footprint import bytes_per_token, dense_bytes, model_sizes, num_parameters, trunk_bytes
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.sizes import ModelSizes, Products
from coldstream.planning.gather import count_in_ram
from coldstream.planning.unknowns import RamShape

CTX = 512


def read(path: Path, kv_type: str = "i16") -> tuple[GGUFFile, ModelSpec, ModelSizes]:
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
    return file, spec, model_sizes(spec, file.tensors, file.fingerprint, kv_token_bytes(spec, kv_type))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("nextn", [False, True])
def test_sizes_of_a_mixture_of_experts(tmp_path: Path, fused: bool, nextn: bool) -> None:
    types = {"blk.1.ffn_down_exps.weight": "Q6_K", "*_exps.weight": "Q4_K"}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, types=dict(reversed(types.items())), fused_experts=fused, nextn=nextn)
    file, spec, sizes = read(path)
    q4, q6 = 256 * 256 // 256 * 144, 256 * 256 // 256 * 210
    assert sizes.expert_bytes == (3 * q4, 2 * q4 + q6, 3 * q4, 3 * q4)
    assert (sizes.num_experts, sizes.num_experts_per_tok) == (8, 2)
    assert sizes.dense_bytes + sizes.all_expert_bytes == trunk_bytes(spec, file.tensors)
    assert sizes.dense_token_bytes + 2 * sum(sizes.expert_bytes) == bytes_per_token(spec, file.tensors)
    assert sizes.expert_parameters == 3 * 256 * 256
    q4_products = Products(QuantType.Q4_K, 3 * 256 * 256, 3 * q4)
    of_two = (Products(QuantType.Q4_K, 2 * 256 * 256, 2 * q4), Products(QuantType.Q6_K, 256 * 256, q6))
    assert sizes.expert_products == ((q4_products,), of_two, (q4_products,), (q4_products,))
    matrices = [
        info
        for info in file.tensors.values()
        if len(info.shape) > 1 and "_exps" not in info.name and not info.name.startswith(("blk.4.", "token_"))
    ]
    assert sum(each.num_values for each in sizes.dense_products) == num_parameters(matrices)
    assert {each.quant_type: each.num_bytes for each in sizes.dense_products} == {
        kind: sum(info.num_bytes for info in matrices if info.quant_type == kind)
        for kind in {info.quant_type for info in matrices}
    }
    assert sizes.attention_width == 1 * 4 * 64
    assert sizes.fingerprint == file.fingerprint
    assert sizes.row_bytes == 4 * spec.hidden_size
    assert sizes.state_bytes == 4 * 3 * (4 * 64 * 64 + 3 * 512)


def test_layers_with_windows_are_read_and_multiplied_only_within_them(tmp_path: Path) -> None:
    """Against a sum over rows and layers. Memory is still taken for all positions."""
    path = tmp_path / "tiny.gguf"
    mixed = MixedAttention(head_counts=(4, 8, 4, 8), windowed=(False, True, True, False), window=40)
    write_gguf(path, "qwen3moe", mixed=mixed)
    _, spec, sizes = read(path, "i16")
    assert sizes.kv_token_bytes == 4 * 2 * 2 * 144
    for context in (0, 1, 39, 40, 41, 1000):
        seen = [min(context, window) for window in (context, 40, 40, context)]
        assert sizes.cached_bytes(context) == sum(seen) * 2 * 2 * 144
    widths = [heads * 64 for heads in mixed.head_counts]
    for start, count in ((0, 1), (0, 30), (0, 100), (30, 20), (100, 64)):
        expected = sum(
            width * (min(row, 40) if is_windowed else row)
            for row in range(start, start + count)
            for width, is_windowed in zip(widths, mixed.windowed, strict=True)
        )
        found = sizes.attention_elements(start, count)
        assert found == pytest.approx(expected, abs=count * sum(widths) / 2)  # rows are half-open there
    assert sizes.attention_elements(0, 8) == replace(sizes, windows=()).attention_elements(0, 8)
    assert sizes.attention_width == spec.attentions[0].query_dim * 6


def test_trap_19_the_cache_counts_attention_layers_in_its_own_type(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    rows = {"i16": 144, "i8": 80, "i4": 48, "i3": 32}
    assert rows.keys() == set(INTEGER_CACHE_TYPES)
    for kv_type, row_bytes in rows.items():
        file, spec, sizes = read(path, kv_type)
        assert sizes.kv_token_bytes == 1 * 2 * 2 * row_bytes  # one layer, two heads of keys and of values
        with GGUFFile.open(path) as opened:
            part, _ = count_in_ram(opened, spec, RamShape(1, "auto", CTX, kv_type))
        assert part.caches == CTX * sizes.kv_token_bytes + 2 * sizes.state_bytes  # of a sequence a block
        assert part.weights == dense_bytes(spec, file.tensors)


def test_matrices_of_odd_sizes_begin_at_whole_lines_of_a_slot(tmp_path: Path) -> None:
    dims = Dims(hidden=32, expert_ffn=32, shared_ffn=32, state=32)
    path = tmp_path / "odd.gguf"
    write_gguf(path, dims=dims, types={"*_exps.weight": "Q8_0"})
    file, spec, sizes = read(path)
    matrix = 32 * 34
    assert sizes.expert_bytes == (3 * 1280,) * 4
    assert sizes.dense_bytes == trunk_bytes(spec, file.tensors) - 4 * 8 * 3 * matrix


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    write_gguf(path, "qwen35")
    file, spec, sizes = read(path)
    assert sizes.expert_bytes == (0,) * 4
    assert sizes.all_expert_bytes == sizes.expert_parameters == 0
    assert sizes.dense_bytes == trunk_bytes(spec, file.tensors)


def test_fused_gate_and_up_lie_apart_in_slots(tmp_path: Path) -> None:
    """Each begins at a whole line, as in the tables that kernels find them in."""
    dims = Dims(hidden=32, expert_ffn=32, shared_ffn=32, state=32)
    path = tmp_path / "odd.gguf"
    write_gguf(path, dims=dims, types={"*_exps.weight": "Q8_0"}, fused_experts=True)
    assert read(path)[2].expert_bytes == (3 * 1280,) * 4
