"""A model's GPU memory beside experts, counted and estimated, and the prefill steps that it has room for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.runners import fixed_part_on_gpu, open_cpu_runner
from builders import Dims, write_gguf
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.indexer.workspace_sizes import workspace_bytes
from coldstream.kvcache import CacheSize
from coldstream.kvcache.cache import is_windowed, kv_token_bytes, window_token_bytes
from coldstream.models.footprint import model_sizes
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.plan import FixedPart, PlanOptions, fast_ring
from coldstream.placement.sizes import ModelSizes
from coldstream.planning import memory as memory_module
from coldstream.planning.gather import count_on_gpu
from coldstream.planning.memory import CHUNK_SIZES, GpuMemory
from coldstream.planning.unknowns import GpuShape

CTX = 512


def read(path: Path) -> tuple[ModelSpec, ModelSizes]:
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
    return spec, model_sizes(spec, file.tensors, file.fingerprint, kv_token_bytes(spec, "i16"))


def memory(
    spec: ModelSpec,
    sizes: ModelSizes,
    ctx_size: int = CTX,
    counts: Mapping[GpuShape, FixedPart] | None = None,
) -> GpuMemory:
    """counts: None: all is estimated."""
    return GpuMemory(spec, sizes, 0, counts, ctx_size, "i16")


def counted_parts(path: Path, spec: ModelSpec, sizes: ModelSizes, budgets: Sequence[int]) -> list[FixedPart]:
    with GGUFFile.open(path) as file:
        return [fixed_part_on_gpu(file, memory(spec, sizes, counts={}), budget) for budget in budgets]


@pytest.mark.sharded
@pytest.mark.parametrize("arch", ["qwen35moe", "qwen35", "qwen3next", "qwen3moe", "qwen4exp", "gemma4"])
def test_what_is_counted_for_a_gpu_and_what_is_estimated_agree(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, arch)
    spec, sizes = read(path)
    (counted,) = counted_parts(path, spec, sizes, [2**33])
    estimated = memory(spec, sizes).fixed_part(2**33)
    assert estimated == replace(
        counted, weights=estimated.weights, caches=estimated.caches, workspace=estimated.workspace
    )
    assert counted.weights == pytest.approx(estimated.weights, rel=0.1)
    assert 0.5 < counted.workspace / estimated.workspace < 2


@pytest.mark.parametrize(("arch", "window"), [("gemma4", None), ("gpt-oss", None), ("qwen35moe", 700)])
def test_caches_of_windows_are_counted_as_a_runner_takes_them(
    tmp_path: Path, arch: str, window: int | None
) -> None:
    """On each device, whether counted or estimated."""
    path, ctx_size = tmp_path / "tiny.gguf", 65_536
    write_gguf(path, arch, dims=Dims(context=ctx_size))
    spec, sizes = read(path)
    windowed = spec.with_window(window)
    gpu = replace(memory(spec, sizes, ctx_size, counts={}), attention_window=window)
    capacity = gpu._capacity(512, is_scarce=True)
    more = replace(capacity.cache_size, num_window_blocks=capacity.cache_size.num_window_blocks + 10)
    with GGUFFile.open(path) as file:
        counted, larger = (
            count_on_gpu(file, spec, sizes, GpuShape(replace(capacity, cache_size=size), 512, window))
            for size in (capacity.cache_size, more)
        )
    assert larger.caches - counted.caches == 10 * 256 * window_token_bytes(windowed, "i16") > 0
    assert larger.window_caches - counted.window_caches == larger.caches - counted.caches
    assert 0 < counted.window_caches == capacity.cache_size.window_bytes(windowed, "i16") < counted.caches
    estimated = replace(gpu, counts=None)._part(512, is_scarce=True)
    assert estimated.window_caches == counted.window_caches < estimated.caches <= counted.caches
    assert estimated.num_window_blocks == counted.num_window_blocks
    with open_cpu_runner(path, threads=1, context_length=ctx_size, attention_window=window) as runner:
        layers = runner._sequences.tensors.layers
        arrays = [each for layer in layers if is_windowed(layer) for each in vars(layer).values()]
        taken = sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))
        assert taken == runner.cache_size.window_bytes(windowed, "i16") > 0


@pytest.mark.parametrize("ctx_size", [512, 32_768, 262_144])
@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3moe"])
def test_the_workspace_of_decode_steps_is_estimated_by_the_context(
    tmp_path: Path, arch: str, ctx_size: int
) -> None:
    """In short steps of prefill, so that a decode step's attention is most of it in long contexts."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, arch, dims=Dims(context=262_144))
    spec, sizes = read(path)
    with GGUFFile.open(path) as file:
        counted = fixed_part_on_gpu(file, memory(spec, sizes, ctx_size, {}), 2**20)
    estimated = memory(spec, sizes, ctx_size).fixed_part(2**20)
    assert counted.chunk_size == estimated.chunk_size == 256
    partial_bytes = 64 * 4 * (ctx_size // 256) * (64 + 2) * 4
    assert min(counted.workspace, estimated.workspace) > partial_bytes
    if ctx_size == 512:
        assert 0.5 < counted.workspace / estimated.workspace < 2
    else:
        assert counted.workspace == pytest.approx(estimated.workspace, rel=0.1)


def test_workspace_of_an_indexer_is_counted(tmp_path: Path) -> None:
    """Beside attention's, and only where texts are longer than what it leaves whole."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen4exp", dims=Dims(context=262_144, top_k=64))
    spec, sizes = read(path)
    assert spec.indexer is not None
    layers = tuple(
        replace(each, mixer=replace(each.mixer, indexer=None)) if kind == "attention" else each
        for each, kind in zip(spec.layers, spec.layer_kinds, strict=True)
    )
    for ctx_size, is_indexed in ((67, False), (68, True), (262_144, True)):
        own, without = (
            memory(each, sizes, ctx_size).fixed_part(2**20) for each in (spec, replace(spec, layers=layers))
        )
        row_numbers = spec.indexer.num_heads * spec.indexer.head_dim
        expected = workspace_bytes(own.chunk_size, row_numbers, ctx_size // 4) if is_indexed else 0
        assert own.workspace - without.workspace == expected
    with GGUFFile.open(path) as file:
        counted = fixed_part_on_gpu(file, memory(spec, sizes, 262_144, {}), 2**20)
    assert 0.6 < counted.workspace / own.workspace < 1.1


def test_a_small_budget_takes_small_steps_of_prefill(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    spec, sizes = read(path)
    budgets = (2**20, 500 * 2**20, 600 * 2**20, 2**33)
    parts = counted_parts(path, spec, sizes, budgets)
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
    spec, sizes = read(path)
    sizes = replace(sizes, expert_bytes=(2**30,) * 4)  # so that activations are a small part of all
    # Too little for all experts, and so for states that are not needed.
    (largest,) = counted_parts(path, spec, sizes, [sizes.all_expert_bytes])
    enough = largest.total + largest.host_tables + sizes.all_expert_bytes
    least = enough - largest.workspace
    budgets = [enough, enough - 1, least + largest.workspace // 7, least]
    parts = counted_parts(path, spec, sizes, budgets)
    assert [part.chunk_size for part in parts] == [16384, 8192, 2048, 16384]
    for budget, part in zip(budgets[:3], parts, strict=False):
        assert part.total + sizes.all_expert_bytes <= budget


class Noted(dict[GpuShape, FixedPart]):
    """Counts that note which of them were looked up."""

    def __init__(self, counts: Mapping[GpuShape, FixedPart]) -> None:
        super().__init__(counts)
        self.asked: set[int] = set()

    def get(self, shape: GpuShape, default: object = None) -> FixedPart:  # type: ignore[override]
        self.asked.add(shape.chunk_size)
        return self[shape]


@pytest.mark.parametrize("shift", [0.25, 1, 4])
def test_the_longest_modest_step_is_found_with_few_counts(
    tmp_path: Path, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the estimate, which says where to look first, is far off."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    spec, sizes = read(path)
    sizes = replace(sizes, expert_bytes=(2**30,) * 4)
    estimated = memory_module.estimated

    def shifted(*arguments: object) -> FixedPart:
        part = estimated(*arguments)  # type: ignore[arg-type]
        return replace(part, workspace=int(part.workspace * shift))

    monkeypatch.setattr(memory_module, "estimated", shifted)
    scarce = memory(spec, sizes)._capacity(512, is_scarce=True)
    shapes = {size: GpuShape(scarce, size) for size in CHUNK_SIZES}
    with GGUFFile.open(path) as file:
        counts = {shape: count_on_gpu(file, spec, sizes, shape) for shape in shapes.values()}
    most = 0
    for budget in range(470 * 2**20, 3500 * 2**20, 101 * 2**20):
        noted = Noted(counts)
        needs = memory(spec, sizes, counts=noted)
        modest = [size for size in CHUNK_SIZES if needs.is_modest(counts[shapes[size]], budget)]
        part = needs.fixed_part(budget)
        assert part == counts[shapes[max(modest, default=CHUNK_SIZES[-1])]]
        most = max(most, len(noted.asked))
    assert most <= (3 if shift == 1 else 5)


def test_states_that_cannot_fit_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    spec, sizes = read(path)
    sizes = replace(sizes, expert_bytes=(2**30,) * 4)
    states = []
    shared = CacheSize.shared

    def noted(*arguments: object, is_scarce: bool, **options: object) -> CacheSize:
        states.append(is_scarce)
        return shared(*arguments, is_scarce=is_scarce, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(CacheSize, "shared", noted)
    counted_parts(path, spec, sizes, [2**32])
    assert all(states)
    counted_parts(path, spec, sizes, [2**36])
    assert not all(states)


@pytest.mark.sharded(of="plans")
def test_the_embedding_is_in_ram_only_where_experts_would_be_missing_otherwise(tmp_path: Path) -> None:
    """Then it is in no sum of the GPU's memory. An embedding that is the head too is on the GPU."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, dims=Dims(vocab=40_000))
    spec, sizes = read(path)
    sizes = replace(sizes, expert_bytes=(2**24,) * 4)
    budgets = range(500 * 2**20, 1200 * 2**20, 3 * 2**22)  # by steps that are no multiple of an expert
    parts = counted_parts(path, spec, sizes, budgets)
    for budget, part in zip(budgets, parts, strict=True):
        room = budget - part.total - sizes.all_expert_bytes
        assert room >= 0 or part.host_tables
        assert not part.host_tables or room < sizes.table_bytes
    in_ram = [part.host_tables > 0 for part in parts]
    assert in_ram == sorted(in_ram, reverse=True)
    assert {part.weights + part.host_tables for part in parts} == {parts[-1].weights}
    assert {part.host_tables for part in parts} == {0, sizes.table_bytes}
    write_gguf(path, tied=True)
    assert not read(path)[1].table_bytes
    (tied,) = counted_parts(path, *read(path), [2**20])
    assert not tied.host_tables


@pytest.mark.parametrize("num_pinned", [0, 1])
def test_a_long_step_leaves_room_for_a_fast_ring_and_for_what_must_be_there(
    tmp_path: Path, num_pinned: int
) -> None:
    """And no shorter one is taken where it does: a few experts gain less."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    spec, sizes = read(path)
    sizes = replace(sizes, expert_bytes=(2**24,) * 4)
    needs = replace(memory(spec, sizes), options=PlanOptions(num_pinned_layers=num_pinned))
    first = num_pinned * 8 * 2**24
    found = set()
    for budget in range(500 * 2**20, 900 * 2**20, 2**21):
        part = needs.fixed_part(budget)
        if part.total + sizes.all_expert_bytes <= budget:
            continue
        found.add(part.chunk_size)
        left = budget - part.total - first
        assert part.chunk_size <= 512 or left >= fast_ring(sizes)
        if part.chunk_size <= 512 and left >= 0:
            long = needs._estimate(1024)
            assert budget - long.total - first < fast_ring(sizes)
    assert found >= {256, 512, 1024, 2048}
