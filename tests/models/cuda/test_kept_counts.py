"""Counts of memory that were made in an earlier start."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from runner_cases import write_variant

from bench.runners import open_model_file
from coldstream.errors import InconsistentError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda import limits as device
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kvcache import CacheSize
from coldstream.models.cuda import kept_counts
from coldstream.models.cuda.kept_counts import kept_count, sources
from coldstream.models.cuda.limits import Limits
from coldstream.models.cuda.memory_plan import CudaMemoryPlan, count_memory
from coldstream.models.spec.model_spec import ModelSpec

SIZES = Limits(CacheSize.of(2, 1024, 1), 1024, "i16")
H100 = DeviceLimits(132, 232448, 233472, True)


class Counting:
    """Counts, and says how often it was asked to. problem: what it raises."""

    def __init__(self) -> None:
        self.num, self.problem = 0, False

    def __call__(self, file: GGUFFile, spec: ModelSpec, limits: Limits, chunk_size: int) -> CudaMemoryPlan:
        self.num += 1
        if self.problem:
            raise InconsistentError("a weight that is no number")
        return count_memory(file, spec, limits, chunk_size)


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(kept_counts, "count_memory", counting)
    monkeypatch.setattr(kept_counts, "directory_of", lambda kept: tmp_path / "kept" / kept.folder)
    monkeypatch.setattr(device, "_limits_of", lambda index: H100)
    return counting


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_variant(tmp_path, "moe")


def test_what_was_counted_is_not_counted_again(path: Path, counting: Counting) -> None:
    file, spec = open_model_file(path)
    first = kept_count(file, spec, SIZES, 256)
    again, spec = open_model_file(path)
    assert kept_count(again, spec, SIZES, 256) == first == count_memory(file, spec, SIZES, 256)
    assert counting.num == 1


def test_what_a_count_follows_from_has_it_counted_again(
    path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, the window of a model, its file, the device and the package."""
    file, spec = open_model_file(path)
    kept_count(file, spec, SIZES, 256)
    for given in (
        (file, spec, SIZES, 128),
        (file, spec, replace(SIZES, context_length=512), 256),
        (file, spec.with_window(64), SIZES, 256),
    ):
        before = counting.num
        assert kept_count(*given) == count_memory(*given)
        assert counting.num == before + 1
    before = counting.num
    os.utime(path, ns=(0, file.written_ns[0] + 1))
    kept_count(*open_model_file(path), SIZES, 256)
    monkeypatch.setattr(device, "_limits_of", lambda index: replace(H100, num_processors=64))
    kept_count(file, spec, SIZES, 256)
    monkeypatch.setattr(device, "_limits_of", lambda index: H100)
    monkeypatch.setattr(kept_counts, "sources", lambda package: "others")
    kept_count(file, spec, SIZES, 256)
    assert counting.num == before + 3


def test_what_cannot_be_counted_is_not_kept(path: Path, counting: Counting) -> None:
    file, spec = open_model_file(path)
    counting.problem = True
    for _ in range(2):
        with pytest.raises(InconsistentError, match="no number"):
            kept_count(file, spec, SIZES, 256)
    counting.problem = False
    assert kept_count(file, spec, SIZES, 256) == count_memory(file, spec, SIZES, 256)


def test_without_a_place_everything_is_counted(
    path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_counts, "directory_of", lambda kept: None)
    file, spec = open_model_file(path)
    assert kept_count(file, spec, SIZES, 256) == kept_count(file, spec, SIZES, 256)
    assert counting.num == 2


def test_sources_are_those_that_were_written_last(tmp_path: Path) -> None:
    """Byte code says nothing that they don't."""

    def found() -> str:
        sources.cache_clear()
        return sources(tmp_path)

    (tmp_path / "room" / "__pycache__").mkdir(parents=True)
    file = tmp_path / "room" / "kernel.cu"
    file.write_text("one")
    seen = [found()]
    (tmp_path / "room" / "__pycache__" / "module.pyc").write_text("byte code")
    assert found() == seen[0]
    file.write_text("more")
    seen.append(found())
    os.utime(file, ns=(0, 1))
    seen.append(found())
    (tmp_path / "other.py").touch()
    seen.append(found())
    assert len(set(seen)) == 4
