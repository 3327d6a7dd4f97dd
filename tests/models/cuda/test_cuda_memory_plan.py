"""What a model takes of a GPU's memory is counted without one."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_cases import MIX

from builders import Dims, write_gguf
from coldstream.errors import OutOfMemoryError
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.memory import MemoryPlan
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kvcache import CacheSize, state_bytes
from coldstream.models.cuda import loaded_model
from coldstream.models.cuda.capacity import HEAD_ROWS
from coldstream.models.cuda.inputs import StepShape
from coldstream.models.cuda.limits import Limits
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.cuda.memory_plan import count_memory, plan_memory
from coldstream.models.read_spec import read_spec
from coldstream.planning.memory import CHUNK_SIZES


@pytest.mark.parametrize("chunk_size", [64, CHUNK_SIZES[0]])
def test_memory_is_planned_without_a_device(moe_path: Path, chunk_size: int) -> None:
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
        plan = plan_memory(file, spec, Limits(CacheSize.of(1, 1024), 1024, "i16"), 40 * 2**30, chunk_size)
        large = plan_memory(file, spec, Limits(CacheSize.of(4, 4096), 4096, "i16"), 40 * 2**30, chunk_size)
        assert plan.weights >= sum(info.num_bytes for info in file.tensors.values())
        assert large.weights == plan.weights
        assert large.caches > 3 * plan.caches
        with pytest.raises(OutOfMemoryError, match=r"needs .* GiB are free: weights .* --device cpu"):
            plan_memory(file, spec, Limits(CacheSize.of(1, 1024), 1024, "i16"), plan.weights, chunk_size)


def test_small_tensors_are_read_once_for_all_plans(moe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    read = GGUFFile.read

    def counted(file: GGUFFile, info: TensorInfo) -> np.ndarray:
        names.append(info.name)
        return read(file, info)

    monkeypatch.setattr(GGUFFile, "read", counted)
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
        for context_length in (1024, 2048):
            limits = Limits(CacheSize.of(1, context_length), context_length, "i16")
            plan_memory(file, spec, limits, 40 * 2**30, 64)
    assert names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("expert_bytes", [None, 0])
def test_trap_19_the_cache_counts_attention_layers_in_its_own_type(
    moe_path: Path, expert_bytes: int | None
) -> None:
    """To the byte, in one attention layer with two heads of 64 values each for keys and values."""
    rows = {"i16": 144, "i8": 80, "i4": 48, "i3": 32}
    assert rows.keys() == set(INTEGER_CACHE_TYPES)
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
        beside = set()
        for num_blocks in (2, 9):
            for kv_type, row_bytes in rows.items():
                limits = Limits(CacheSize(num_blocks, num_states=2), 512, kv_type, expert_bytes)
                plan = count_memory(file, spec, limits, 256)
                assert plan_memory(file, spec, limits, plan.total, 256) == plan
                beside.add(plan.caches - num_blocks * 256 * 2 * 2 * row_bytes)
    assert len(beside) == 1  # inputs of a step and the like
    assert 2 * state_bytes(spec) < beside.pop() < 2 * state_bytes(spec) + 2**20


@pytest.mark.parametrize("expert_bytes", [None, 0])
def test_nf01_what_an_error_keeps_takes_no_memory_of_the_next_step(
    moe_path: Path, expert_bytes: int | None
) -> None:
    """The traceback of a failed request keeps logits, which must not stand in the way of what was planned."""
    limits = Limits(CacheSize.of(1, 1024), 1024, "i16", expert_bytes)
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
        memory = MemoryPlan()
        loaded = Loaded.into(memory, file, spec, limits, 512)
        kept = []
        peaks = []
        for count in (512, 108, 512, 108, 512):
            step = loaded.kept_step if limits.keeps_hidden(count) else loaded.step
            hidden = step(StepShape.prompt(count))
            kept.append(loaded.model.logits(hidden.rows(count - 1, 1)))
            peaks.append(memory.workspace_bytes)
        assert len(set(peaks)) == 1
        assert peaks[0] <= count_memory(file, spec, limits, 512).workspace


@pytest.mark.parametrize("expert_bytes", [None, 0])
@pytest.mark.parametrize("num_rows", [65, 512])
def test_rows_far_into_a_text_take_no_more_than_is_counted(
    moe_path: Path, expert_bytes: int | None, num_rows: int
) -> None:
    """What attention leaves of their parts, beside the activations of all."""
    limits = Limits(CacheSize.of(1, 65536), 65536, "i16", expert_bytes)
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
        memory = MemoryPlan()
        loaded = Loaded.into(memory, file, spec, limits, 512)
        hidden = loaded.kept_step(replace(StepShape.prompt(num_rows), is_deep=True))
        loaded.model.logits(hidden.rows(num_rows - 1, 1))
        assert memory.workspace_bytes <= count_memory(file, spec, limits, 512).workspace


def test_the_head_has_the_workspace_of_a_step_that_the_host_divides(tmp_path: Path) -> None:
    """Its hidden states are copied first: in the workspace they left no room for logits in one piece."""
    (path,) = write_gguf(tmp_path / "moe.gguf", types=MIX, dims=Dims(vocab=20000))
    limits = Limits(CacheSize.of(1, 1024), 1024, "i16", 0)
    peaks = {}
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        for step in (Loaded.kept_step, Loaded.step):
            memory = MemoryPlan()
            loaded = Loaded.into(memory, file, spec, limits, 512)
            hidden = step(loaded, StepShape.prompt(512))
            loaded.model.logits(hidden.rows(0, HEAD_ROWS))
            peaks[step] = memory.workspace_bytes
        assert limits.is_recorded(512)
        assert peaks[Loaded.kept_step] <= count_memory(file, spec, limits, 512).workspace
        assert count_memory(file, spec, limits, 512).workspace < 0.6 * peaks[Loaded.step]


@pytest.mark.parametrize("expert_bytes", [None, 0, 10**6])
def test_mm01_a_byte_short_is_refused(moe_path: Path, expert_bytes: int | None) -> None:
    """With everything counted that is ever taken, slots for experts included."""
    limits = Limits(CacheSize.of(1, 1024), 1024, "i16", expert_bytes)
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
        need = plan_memory(file, spec, limits, 40 * 2**30, 256).total
        assert plan_memory(file, spec, limits, need, 256).total == need
        with pytest.raises(OutOfMemoryError, match=r"needs .* GiB, .* are free: .*--vram"):
            plan_memory(file, spec, limits, need - 1, 256)


class AliveOps(CudaOps):
    """Notes which normed states are still there while a mixer runs."""

    normed: list[weakref.ref[object]]
    alive: int

    def add_norm(self, *arguments: Any, **options: Any) -> tuple[DeviceArray, Activations]:
        total, out = super().add_norm(*arguments, **options)
        self.normed.append(weakref.ref(out.values))
        return total, out

    def _look(self) -> None:
        self.alive = max(self.alive, sum(each() is not None for each in self.normed))

    def attention(self, *arguments: Any) -> Activations:
        self._look()
        return super().attention(*arguments)

    def gated_delta_net(self, *arguments: Any) -> Activations:
        self._look()
        return super().gated_delta_net(*arguments)


def test_a_mixer_does_not_keep_the_states_that_it_has_projected(
    moe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 8 KB a row of a prompt, in memory that its recurrence needs."""
    monkeypatch.setattr(loaded_model, "CudaOps", AliveOps)
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
        loaded = Loaded.into(MemoryPlan(), file, spec, Limits(CacheSize.of(1, 1024), 1024, "i16"), 512)
        assert isinstance(loaded.ops, AliveOps)
        loaded.ops.normed, loaded.ops.alive = [], 0
        loaded.step(StepShape.prompt(512))
    assert len(loaded.ops.normed) == 2 * spec.num_layers
    assert not loaded.ops.alive
