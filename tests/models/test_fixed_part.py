"""Sizes of a model for placement, and its memory beside experts, against sums written out by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import Dims, write_gguf
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kvcache import CacheSize
from coldstream.models import fixed_part
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.draft_room import NO_DRAFTS
from coldstream.models.fixed_part import CHUNK_SIZES, fixed_parts_on_gpu
from coldstream.models.footprint import bytes_per_token, dense_bytes, model_sizes, trunk_bytes
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.plan import FixedPart
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.config import EngineConfig, cache_bytes_per_token

CTX = 512


def read(path: Path, kv_type: str = "i16") -> tuple[GGUFFile, ModelSpec, ModelSizes]:
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
    config = EngineConfig("m", cache_type_k=kv_type, cache_type_v=kv_type)  # type: ignore[arg-type]
    kv_bytes = cache_bytes_per_token(config, spec)
    return file, spec, model_sizes(spec, file.tensors, file.fingerprint, kv_bytes)


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
    assert sizes.attention_width == 1 * 4 * 64
    assert sizes.fingerprint == file.fingerprint
    assert sizes.state_bytes == 4 * 3 * (4 * 64 * 64 + 3 * 512)


def test_trap_19_the_cache_counts_attention_layers_in_its_own_type(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    rows = {"i16": 144, "i8": 80, "i4": 48, "i3": 32}
    assert rows.keys() == set(INTEGER_CACHE_TYPES)
    for kv_type, row_bytes in rows.items():
        file, spec, sizes = read(path, kv_type)
        assert sizes.kv_token_bytes == 1 * 2 * 2 * row_bytes  # one layer, two heads of keys and of values
        with GGUFFile.open(path) as opened:
            part = CpuRunner.needs(opened, spec, 1, "auto", CTX, kv_type).fixed_mapped
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


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen35", "qwen3next", "qwen3moe"])
def test_what_is_counted_for_a_gpu_and_what_is_estimated_agree(
    tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, arch)
    _, spec, sizes = read(path)
    with GGUFFile.open(path) as file:
        (counted,) = fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", [2**33])
    monkeypatch.setattr(fixed_part, "missing_packages", lambda: ("torch",))
    with GGUFFile.open(path) as file:
        (estimated,) = fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", [2**33])
    assert estimated == replace(
        counted, weights=estimated.weights, caches=estimated.caches, workspace=estimated.workspace
    )
    assert counted.weights == pytest.approx(estimated.weights, rel=0.1)
    assert 0.5 < counted.workspace / estimated.workspace < 2


@pytest.mark.parametrize("ctx_size", [512, 32_768, 262_144])
@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3moe"])
def test_the_workspace_of_decode_steps_is_estimated_by_the_context(
    tmp_path: Path, arch: str, ctx_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In short steps of prefill, so that a decode step's attention is most of it in long contexts."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, arch, dims=Dims(context=262_144))
    _, spec, sizes = read(path)
    with GGUFFile.open(path) as file:
        (counted,) = fixed_parts_on_gpu(file, spec, sizes, ctx_size, "i16", [2**20])
        monkeypatch.setattr(fixed_part, "missing_packages", lambda: ("torch",))
        (estimated,) = fixed_parts_on_gpu(file, spec, sizes, ctx_size, "i16", [2**20])
    assert counted.chunk_size == estimated.chunk_size == 256
    partial_bytes = 64 * 4 * (ctx_size // 256) * (64 + 2) * 4
    assert min(counted.workspace, estimated.workspace) > partial_bytes
    if ctx_size == 512:
        assert 0.5 < counted.workspace / estimated.workspace < 2
    else:
        assert counted.workspace == pytest.approx(estimated.workspace, rel=0.1)


def test_a_small_budget_takes_small_steps_of_prefill(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    _, spec, sizes = read(path)
    budgets = (2**20, 500 * 2**20, 600 * 2**20, 2**33)
    with GGUFFile.open(path) as file:
        parts = fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", budgets)
        assert [parts[2]] == fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", budgets[2:3])
    for budget, part in zip(budgets, parts, strict=True):
        if part.chunk_size > 256:
            # States for further sequences come from what all experts leave free.
            left = budget - part.total + part.workspace + (part.num_sequences - 1) * sizes.state_bytes
            assert part.workspace <= 0.5 * left
    chunks = [part.chunk_size for part in parts]
    assert chunks == sorted(chunks)
    assert (chunks[0], chunks[-1]) == (256, 16384)


def test_steps_get_shorter_where_that_lets_all_experts_fit(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    _, spec, sizes = read(path)
    sizes = replace(sizes, expert_bytes=(2**30,) * 4)  # so that activations are a small part of all
    with GGUFFile.open(path) as file:
        # Too little for all experts, and so for states that are not needed.
        (largest,) = fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", [sizes.all_expert_bytes])
        enough = largest.total + sizes.all_expert_bytes
        least = enough - largest.workspace
        budgets = [enough, enough - 1, least + largest.workspace // 7, least]
        parts = fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", budgets)
    assert [part.chunk_size for part in parts] == [16384, 8192, 2048, 16384]
    for budget, part in zip(budgets[:3], parts, strict=False):
        assert part.total + sizes.all_expert_bytes <= budget


@pytest.mark.parametrize("shift", [0.25, 1, 4])
def test_the_longest_modest_step_is_found_with_few_counts(
    tmp_path: Path, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the estimate, which says where to look first, is far off."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    _, spec, sizes = read(path)
    sizes = replace(sizes, expert_bytes=(2**30,) * 4)
    count, estimate = fixed_part._counted, fixed_part._estimated
    asked: list[int] = []

    def counted(*arguments: Any, **options: Any) -> FixedPart:
        part = count(*arguments, **options)
        asked.append(part.chunk_size)
        return part

    def shifted(*arguments: Any, **options: Any) -> FixedPart:
        part = estimate(*arguments, **options)
        return replace(part, workspace=int(part.workspace * shift))

    monkeypatch.setattr(fixed_part, "_estimated", shifted)
    with GGUFFile.open(path) as file:
        caches = CacheSize.shared(spec, CTX, "i16", is_scarce=True)
        of_size = {
            size: count(file, spec, sizes, caches, CTX, "i16", size, NO_DRAFTS) for size in CHUNK_SIZES
        }
        monkeypatch.setattr(fixed_part, "_counted", counted)
        most = 0
        for budget in range(470 * 2**20, 3500 * 2**20, 101 * 2**20):
            modest = [size for size in CHUNK_SIZES if fixed_part._is_modest(of_size[size], budget)]
            asked.clear()
            (part,) = fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", [budget])
            assert part == of_size[max(modest, default=CHUNK_SIZES[-1])]
            assert len(asked) == len(set(asked)), "nothing is counted twice"
            most = max(most, len(asked))
    assert most <= (3 if shift == 1 else 5)


def test_states_that_cannot_fit_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    _, spec, sizes = read(path)
    sizes = replace(sizes, expert_bytes=(2**30,) * 4)
    states = []
    shared = CacheSize.shared

    def noted(*arguments: Any, is_scarce: bool, **options: Any) -> CacheSize:
        states.append(is_scarce)
        return shared(*arguments, is_scarce=is_scarce, **options)

    monkeypatch.setattr(CacheSize, "shared", noted)
    with GGUFFile.open(path) as file:
        fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", [2**32])
        assert all(states)
        fixed_parts_on_gpu(file, spec, sizes, CTX, "i16", [2**36])
        assert not all(states)
