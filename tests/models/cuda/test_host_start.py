"""The order of a start on a GPU that does not hold all experts, on the host."""

import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from one_sequence import OneSequence, open_cpu, step_rows
from runner_cases import token_ids

from builders import Dims, write_gguf
from coldstream.errors import DeviceError, OutOfMemoryError
from coldstream.experts import file_lock
from coldstream.experts.host import HostExperts
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda import host_memory
from coldstream.kernels.cuda.contents import read
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.cuda.loader import CudaLoader
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import allocations, calls
from coldstream.kvcache.batch import Batch, Segment
from coldstream.kvcache.cache import CacheSize
from coldstream.models.cuda import runner as cuda_runner
from coldstream.models.cuda.runner import CudaRunner
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


@pytest.mark.sharded(of="models on a GPU")
def test_the_file_is_locked_beside_dry_runs_and_copies(path: Path, events: list[str]) -> None:
    """What is allocated, which waits for the lock, comes beside the dry runs or behind them."""
    with open_partly(path, 0.5):
        order = list(dict.fromkeys(events))
        assert order.index("FileLock") < order.index("page_locked") < order.index("DeviceMemory")
        assert [event for event in order if event != "page_locked"] == [
            "FileLock",
            "kernels_of",
            "plan_memory",
            "DeviceMemory",
            "finish_loading",
            "device_address",
        ]


@pytest.mark.sharded(of="models on a GPU")
def test_page_locked_memory_is_allocated_beside_the_dry_runs(
    path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which go on once it is there."""
    allocated = threading.Event()
    notes, allocate = cuda_runner.kernels_of, CudaRunner._allocate_on_host

    def kernels(*sizes: Any) -> Any:
        assert allocated.wait(60)
        return notes(*sizes)

    def allocating(*arguments: Any) -> None:
        allocate(*arguments)
        allocated.set()

    monkeypatch.setattr(cuda_runner, "kernels_of", kernels)
    monkeypatch.setattr(CudaRunner, "_allocate_on_host", allocating)
    with open_partly(path, 0.5):
        assert events.index("page_locked") < events.index("kernels_of") < events.index("DeviceMemory")


@pytest.mark.sharded
@pytest.mark.parametrize("name", ["kernels_of", "plan_memory", "_partial_model"])
def test_what_a_failed_start_has_allocated_is_freed(
    path: Path,
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
    compiled_for_the_host: HostDevice,
    name: str,
) -> None:
    def refuse(*_: Any) -> None:
        raise OutOfMemoryError("no room")

    monkeypatch.setattr(cuda_runner, name, refuse)
    gc.collect()
    before = dict(compiled_for_the_host.driver._elsewhere)
    with pytest.raises(OutOfMemoryError, match="no room"):
        open_partly(path, 0.5)
    gc.collect()
    assert compiled_for_the_host.driver._elsewhere == before


@pytest.mark.sharded(of="models on a GPU")
def test_the_first_steps_of_an_early_start_are_the_callers(
    path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: dict[bool, int] = {}
    for is_early in (False, True):
        with open_partly(path, 0.5, is_early=is_early) as opened:
            captured[is_early] = opened.runner.num_captured
    assert captured[False] > captured[True] == 0


class HeldLock:
    """Locks of files, which begin when the runner says so, and go on when the test does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._may_go = threading.Event(), threading.Event()
        self._register = file_lock.register
        self.outcome: Callable[[], Any] | None = None  # in place of a registration
        monkeypatch.setattr(file_lock, "register", self._held)

    def _held(self, *arguments: Any) -> Any:
        self.begun.set()
        self._may_go.wait()
        return self.outcome() if self.outcome else self._register(*arguments)

    def go_on(self) -> None:
        """From now on nothing is held."""
        self._may_go.set()

    def finish(self, runner: OneSequence) -> None:
        """Returns when all parts are locked."""
        self.go_on()
        wait(runner.runner._partial.host._begun.values())


@pytest.fixture
def held(compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldLock]:
    with gpu_on(compiled_for_the_host):
        yield HeldLock(monkeypatch)


def open_with_bus(path: Path, *, is_early: bool) -> OneSequence:
    """With some of the missing experts read over the bus, and some prefetched."""
    prefetching = Prefetching(1, 2)
    return open_partly(path, 0.4, streamed=0.5, prefetching=prefetching, is_early=is_early)


def tokens_of(runner: OneSequence, num_prompt: int, *, hears: Callable[[int], None]) -> list[np.ndarray]:
    """Logits after a prompt and after each of eight tokens; `hears` is called before each of these."""
    found = [runner.prefill(token_ids(num_prompt))]
    for token in range(8):
        hears(token)
        found.append(runner.decode(token))
    return found


@pytest.fixture
def expected(path: Path, held: HeldLock) -> Callable[[int], list[np.ndarray]]:
    """Logits of a model whose file was locked before its first step."""

    def of(num_prompt: int) -> list[np.ndarray]:
        held.go_on()
        with open_with_bus(path, is_early=False) as runner:
            found = tokens_of(runner, num_prompt, hears=lambda _: None)
        held._may_go.clear()
        held.begun.clear()
        return found

    return of


def test_the_first_token_comes_before_the_lock_of_the_file(
    path: Path,
    held: HeldLock,
    expected: Callable[[int], list[np.ndarray]],
    compiled_for_the_host: HostDevice,
) -> None:
    """No step before reads it over the bus, and none is captured. The next one waits for the lock."""
    wanted, registered = expected(5), compiled_for_the_host.driver.registered
    with open_with_bus(path, is_early=True) as runner:

        def hear(token: int) -> None:
            partial, executor = runner.runner._partial, runner.runner._loaded.ops.model_executor
            is_locked = token > 0
            assert held.begun.is_set() == is_locked
            assert partial.is_filled == is_locked
            assert bool(registered) == is_locked
            assert executor.tables.is_readable == is_locked
            assert read(executor.decode.times).any() == is_locked
            assert bool(runner.runner._steps._graphs) == (token > 1)
            assert runner.expert_uses is not None
            assert any(runner.expert_uses) == (token > 1)
            held.go_on()

        found = tokens_of(runner, 5, hears=hear)
    assert not registered
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_equal_parts_of_a_first_prompt_are_not_captured_before_the_lock(path: Path, held: HeldLock) -> None:
    """The second step of a shape would be. What is captured then knows nothing of the bus."""
    with open_with_bus(path, is_early=True) as runner:
        for part in range(3):
            rows = Segment(runner.sequence, token_ids(15)[5 * part : 5 * part + 5], wanted=())
            runner.runner.step(Batch((rows,)))
            assert not held.begun.is_set()
            assert not runner.runner._steps._graphs
        held.go_on()


@pytest.mark.sharded(of="models on a GPU")
def test_a_long_first_prompt_waits_for_the_lock(
    path: Path, held: HeldLock, expected: Callable[[int], list[np.ndarray]]
) -> None:
    wanted = expected(80)
    with open_with_bus(path, is_early=True) as runner:
        assert not held.begun.is_set()
        held.go_on()

        def hear(_: int) -> None:
            assert runner.runner._partial.is_filled
            assert runner.runner._loaded.ops.model_executor.tables.is_readable

        found = tokens_of(runner, 80, hears=hear)
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.sharded(of="models on a GPU")
def test_a_system_that_locks_nothing_after_the_first_token_leaves_the_experts_to_the_cpu(
    path: Path, held: HeldLock, expected: Callable[[int], list[np.ndarray]]
) -> None:
    wanted = expected(5)
    held.outcome = lambda: None
    with open_with_bus(path, is_early=True) as runner:
        found = tokens_of(runner, 5, hears=lambda _: held.go_on())
        assert not runner.runner._loaded.ops.model_executor.tables.is_readable
        assert runner.runner._steps._graphs
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_an_error_of_a_late_lock_is_that_of_a_step(path: Path, held: HeldLock) -> None:
    def fail() -> None:
        raise DeviceError("no driver")

    held.outcome = fail
    with open_with_bus(path, is_early=True) as runner:
        runner.prefill(token_ids(5))
        held.go_on()
        with pytest.raises(DeviceError, match="no driver"):
            runner.decode(1)


@pytest.mark.parametrize("is_over", [False, True])
def test_who_waits_for_no_token_has_the_file_locked_at_once(
    path: Path, held: HeldLock, is_over: bool
) -> None:
    """And a first prompt waits for it no longer than it takes."""
    with open_with_bus(path, is_early=True) as runner:
        runner.runner.go_on_loading()
        assert held.begun.wait(60)
        if is_over:
            held.finish(runner)
        runner.prefill(token_ids(5))
        assert runner.runner._partial.is_filled == is_over
        held.go_on()


def test_a_model_that_is_closed_behind_its_first_token_locked_nothing(path: Path, held: HeldLock) -> None:
    with open_with_bus(path, is_early=True) as runner:
        runner.prefill(token_ids(5))
    runner.runner.go_on_loading()
    assert not held.begun.is_set()


@pytest.mark.sharded(of="models on a GPU")
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
    path: Path, events: list[str], compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OutOfMemoryError("the GPU needs more")

    monkeypatch.setattr(cuda_runner, "plan_memory", refuse)
    with pytest.raises(OutOfMemoryError, match="needs more"):
        open_partly(path, 0.5)
    assert events[0] == "FileLock"
    assert not compiled_for_the_host.driver.registered


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


@pytest.mark.usefixtures("events")
def test_a_context_that_is_shorter_than_the_steps_that_are_recorded(path: Path) -> None:
    """All that these take is counted, though no text is as long."""
    ids = token_ids(40)
    with (
        open_cpu(path, threads=1, context_length=64) as plain,
        open_partly(path, 0.5, streamed=0.5, context_length=64) as runner,
    ):
        assert np.array_equal(np.array(runner.extend(ids)), plain.extend(ids))
