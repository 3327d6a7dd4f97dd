"""The order of a start on a GPU that does not hold all experts, on the host."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from one_sequence import step_rows
from runner_cases import token_ids

from builders import Dims, write_gguf
from coldstream.errors import OutOfMemoryError
from coldstream.experts.host import HostExperts
from coldstream.kernels.cuda import host_memory
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.cuda.loader import CudaLoader
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import allocations, calls
from coldstream.kvcache.batch import Batch, Segment
from coldstream.kvcache.cache import CacheSize
from coldstream.models.cuda import runner as cuda_runner
from host_device import HostDevice
from host_gpu import gpu_on


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path, dims=Dims(layers=4, experts=16, experts_used=3))
    return path


@pytest.fixture
def events(compiled_for_the_host: HostDevice) -> Iterator[list[str]]:
    """What happens, in order."""
    found: list[str] = []
    with gpu_on(compiled_for_the_host), pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (cuda_runner, "FileLock"),
            (cuda_runner, "plan_memory"),
            (cuda_runner, "kernels_of"),
            (allocations, "page_locked"),
            (cuda_runner, "DeviceMemory"),
            (CudaLoader, "finish_loading"),
            (HostExperts, "device_address"),
            (RegisteredMemory, "close"),
        ):
            patch.setattr(owner, name, _noting(found, name, getattr(owner, name)))
        yield found


def _noting(events: list[str], name: str, call: Any) -> Any:
    def noted(*arguments: Any, **options: Any) -> Any:
        events.append(name)
        return call(*arguments, **options)

    return noted


def test_the_file_is_locked_beside_dry_runs_and_copies(path: Path, events: list[str]) -> None:
    """And nothing that is allocated, which would wait for the lock, comes before the dry runs."""
    with open_partly(path, 0.5):
        assert list(dict.fromkeys(events)) == [
            "FileLock",
            "plan_memory",
            "kernels_of",
            "page_locked",
            "DeviceMemory",
            "finish_loading",
            "device_address",
        ]


def test_the_first_steps_of_an_early_start_are_the_callers(
    path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: dict[bool, int] = {}
    for is_early in (False, True):
        with open_partly(path, 0.5, is_early=is_early) as opened:
            captured[is_early] = opened.runner.num_captured
    assert captured[False] > captured[True] == 0


@pytest.mark.parametrize("is_early", [False, True])
def test_kernels_of_a_capture_were_launched_outside_of_one(
    path: Path, compiled_for_the_host: HostDevice, is_early: bool
) -> None:
    """So that they are loaded: also those of kinds of steps that are met later."""
    launched, captured = set[tuple[Path, str]](), set[tuple[Path, str]]()
    with gpu_on(compiled_for_the_host), pytest.MonkeyPatch.context() as patch:
        kernel = CudaProgram.kernel

        def noting(program: CudaProgram, instance: str) -> Any:
            name = program.source, instance
            if calls.is_capturing():
                assert name in launched
                captured.add(name)
            else:
                launched.add(name)
            return kernel(program, instance)

        patch.setattr(CudaProgram, "kernel", noting)
        patch.setattr(cuda_runner, "SHORT_CONTEXT", 48)
        sizes = CacheSize.of(2, 256, 1)
        with open_partly(path, 0.5, is_early=is_early, cache_size=sizes) as runner:
            for count in (1, 5, 8, 20, 60):
                runner.reset()
                for _ in range(2):
                    runner.extend(token_ids(count))
                    for token in (1, 2, 3):
                        runner.decode(token)
            other = runner.new_sequence()
            for _ in range(2):
                step_rows(runner, [runner.sequence, other], [1, 2])
                runner.step(Batch((Segment(other, [3] * 6, range(-1, 5)),)))
                runner.commit(other, range(2))
            assert runner.runner.num_captured > 6
    assert len(captured) > 20


def test_a_model_that_does_not_fit_leaves_nothing_locked(
    path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OutOfMemoryError("the GPU needs more")

    monkeypatch.setattr(cuda_runner, "plan_memory", refuse)
    with pytest.raises(OutOfMemoryError, match="needs more"):
        open_partly(path, 0.5)
    assert events == ["FileLock", "close"]


@pytest.mark.parametrize("in_ram", [None, 0.6], ids=["mapped", "pool"])
def test_copies_from_a_file_that_is_locked_in_pieces_are_of_one_each(
    path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch, in_ram: float | None
) -> None:
    """As the driver refuses others. Into slots, and through the ring of a prompt."""
    with gpu_on(compiled_for_the_host):
        found = []
        for piece_bytes in (host_memory.PIECE_BYTES, 2 * mmap.PAGESIZE):
            monkeypatch.setattr(host_memory, "PIECE_BYTES", piece_bytes)
            with open_partly(path, 0.5, in_ram=in_ram) as runner:
                found.append([runner.prefill(token_ids(60)), *(runner.decode(token) for token in (1, 2, 3))])
                assert runner.expert_cache is not None
                if in_ram is None:
                    assert runner.runner.stream_counters.streamed.sum() > 0
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
