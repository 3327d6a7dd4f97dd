"""Long prompts on a GPU that does not hold all experts have the bits of one that does."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cuda.bindings import driver
from cuda_runner_cases import open_cuda, open_partly
from one_sequence import OneSequence
from runner_cases import VARIANTS, token_ids, write_mixed_layers, write_variant

from coldstream.assets import demo_model_path
from coldstream.errors import DeviceError, ModelChangedError
from coldstream.experts import copies
from coldstream.experts.copies import DirectCopies
from coldstream.experts.cpu_share import CpuShare, Share
from coldstream.experts.prefetch import Prefetching
from coldstream.experts.staging import least_ring
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.cuda.runtime import streams
from coldstream.kernels.experts.shapes import MAX_SHARED_ROWS
from coldstream.kvcache import CacheSize
from coldstream.models.cuda.limits import Limits
from coldstream.models.cuda.memory_plan import plan_memory
from coldstream.models.read_spec import read_spec

CONTEXT = 640
LENGTHS = (65, 168, 300, 513)
CPU_SHARES: dict[str, Callable[..., Share]] = {
    "none": lambda self, rows, experts, *rest: Share(0, 1.0, math.inf),
    "some": lambda self, rows, experts, *rest: Share(len(experts) // 3, 1.0, math.inf),
    "all": lambda self, rows, experts, *rest: Share(len(experts), 1.0, math.inf),
}
MIB = 2**20


def least_ring_of(path: Path) -> int:
    with GGUFFile.open(path) as file:
        experts = [info for info in file.tensors.values() if "_exps." in info.name]
        layers = {info.name.split(".")[1] for info in experts}
        return max(
            least_ring(sum(i.num_bytes // i.shape[0] for i in experts if i.name.split(".")[1] == layer))
            for layer in layers
        )


def outputs(runner: OneSequence, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits after each token of a prompt, and after some that follow it."""
    runner.reset()
    logits = runner.logits(token_ids(length)).copy()
    return logits, np.stack([runner.decode(token) for token in token_ids(7)])


def delay(stream: streams.Stream, cycles: int) -> None:
    """Work that is queued in the stream from now on waits so long; on the host it runs at once."""
    if not torch.cuda.is_available():
        return
    # PyTorch refuses the default stream's handle as one of others.
    is_default = stream is streams.default_stream()
    theirs = torch.cuda.default_stream() if is_default else torch.cuda.ExternalStream(stream.handle)
    with torch.cuda.stream(theirs):
        torch.cuda._sleep(cycles)


@pytest.fixture(scope="module")
def demo() -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """With all experts resident."""
    with open_cuda(demo_model_path(), CONTEXT) as runner:
        return {length: outputs(runner, length) for length in LENGTHS}


class Model(NamedTuple):
    path: Path
    outputs: dict[int, tuple[np.ndarray, np.ndarray]]  # with all experts resident


@pytest.fixture(scope="module", params=["demo", "qwen3moe", "qwen3next", "qwen4exp"])
def model(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    demo: dict[int, tuple[np.ndarray, np.ndarray]],
) -> Model:
    """A model of each family with experts."""
    if request.param == "demo":
        return Model(demo_model_path(), demo)
    path = write_mixed_layers(tmp_path_factory.mktemp("models"), request.param)
    with open_cuda(path, CONTEXT) as runner:
        return Model(path, {length: outputs(runner, length) for length in LENGTHS})


def check_outputs(runner: OneSequence, expected_of: dict[int, tuple[np.ndarray, np.ndarray]]) -> None:
    for length, expected in expected_of.items():
        for found, wanted in zip(outputs(runner, length), expected, strict=True):
            assert np.array_equal(found, wanted), length


@pytest.mark.parametrize("ring_bytes", [3 * MIB, 256 * MIB])
def test_the_ring_is_planned(ring_bytes: int) -> None:
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        plan, small = (
            plan_memory(
                file,
                spec,
                Limits(CacheSize.of(1, CONTEXT), CONTEXT, "i16", 0, ring_bytes=size),
                40 * 2**30,
                8192,
            )
            for size in (ring_bytes, MIB)
        )
        assert plan.total - small.total == ring_bytes - MIB


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("ring_bytes", ["least", 4 * MIB, 64 * MIB])
def test_any_residency_ring_and_share_of_the_cpu(
    share: float, ring_bytes: int | str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = least_ring_of(model.path) if isinstance(ring_bytes, str) else ring_bytes
    with open_partly(model.path, share, context_length=CONTEXT, ring_bytes=size) as runner:
        check_outputs(runner, model.outputs)
        for split in CPU_SHARES.values():
            monkeypatch.setattr(CpuShare, "split", split)
            check_outputs(runner, model.outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("streamed", [0.1, 0.5, 1.0])
def test_steps_whose_experts_the_device_shares_out(share: float, streamed: float, model: Model) -> None:
    """Up to MAX_SHARED_ROWS rows are captured steps; of a longer one the host shares experts out."""
    sizes = {"context_length": CONTEXT, "chunk_size": CONTEXT, "ring_bytes": 64 * MIB}
    with open_partly(model.path, share, streamed=streamed, **sizes) as runner:  # type: ignore[arg-type]
        assert runner.runner.limits.shared_rows == MAX_SHARED_ROWS
        counts = runner.stream_counters
        assert counts is not None
        for length, expected in model.outputs.items():
            wanted = counts.wanted.sum()
            check_outputs(runner, {length: expected})
            assert (counts.wanted.sum() > wanted) == (length > MAX_SHARED_ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [name for name, (arch, _) in VARIANTS.items() if arch != "qwen35"])
def test_weights_of_all_types(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_variant(tmp_path, variant)
    with open_cuda(path, CONTEXT) as runner:
        expected = outputs(runner, 66)
    with open_partly(path, 0.0, context_length=CONTEXT, ring_bytes=least_ring_of(path)) as runner:
        for split in CPU_SHARES.values():
            monkeypatch.setattr(CpuShare, "split", split)
            for found, wanted in zip(outputs(runner, 66), expected, strict=True):
                assert np.array_equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("ring_bytes", [4 * MIB, 64 * MIB])
def test_a_system_that_shares_no_file_with_the_device(
    ring_bytes: int,
    demo: dict[int, tuple[np.ndarray, np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RegisteredMemory, "register", classmethod(lambda cls, *_, **__: None))
    with open_partly(demo_model_path(), 0.0, context_length=CONTEXT, ring_bytes=ring_bytes) as runner:
        check_outputs(runner, demo)


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["copies", "products"])
def test_nothing_is_read_before_it_arrived_or_overwritten_before_it_was_read(
    late: str, demo: dict[int, tuple[np.ndarray, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EX04: with a ring of three experts, each of them late, old bytes would be in the logits."""
    begin = DirectCopies.begin

    def begin_late(self: DirectCopies, *args: Any) -> Any:
        delay(self._stream if late == "copies" else streams.current_stream(), 300_000)
        return begin(self, *args)

    monkeypatch.setattr(DirectCopies, "begin", begin_late)
    with open_partly(
        demo_model_path(), 0.0, context_length=CONTEXT, ring_bytes=least_ring_of(demo_model_path())
    ) as runner:
        check_outputs(runner, {168: demo[168]})


@pytest.mark.gpu
def test_a_copy_that_is_refused_once_is_repeated_and_twice_an_error(
    demo: dict[int, tuple[np.ndarray, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EX01: the step fails with a typed error, and the next one has its bits."""
    copy, calls, refused = driver.cuMemcpyBatchAsync, [0], set[int]()

    def refuse(*args: Any) -> Any:
        calls[0] += 1
        return (driver.CUresult.CUDA_ERROR_NOT_READY,) if calls[0] in refused else copy(*args)

    with open_partly(demo_model_path(), 0.0, context_length=CONTEXT, ring_bytes=4 * MIB) as runner:
        monkeypatch.setattr(copies.driver, "cuMemcpyBatchAsync", refuse)
        for times in (1, 2):
            calls[0], refused = 0, {8 + i for i in range(times)}
            if times == 1:
                check_outputs(runner, {300: demo[300]})
                continue
            with pytest.raises(DeviceError, match="cannot be copied"):
                outputs(runner, 300)
            check_outputs(runner, {300: demo[300]})


@pytest.mark.gpu
def test_ex04_what_a_failed_step_still_copies_is_no_expert_that_came_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its groups are on their way into the ring when decoding begins, which prefetches into it."""
    copy, begin, calls = driver.cuMemcpyBatchAsync, DirectCopies.begin, [0]

    def begin_late(self: DirectCopies, *args: Any) -> Any:
        delay(self._stream, 3_000_000)
        return begin(self, *args)

    def refuse(*args: Any) -> Any:
        calls[0] += 1
        return (driver.CUresult.CUDA_ERROR_NOT_READY,) if calls[0] >= 8 else copy(*args)

    def decoded(runner: OneSequence) -> np.ndarray:
        runner.reset()
        return np.stack([np.array(runner.decode(token)) for token in token_ids(30)])

    with open_cuda(demo_model_path(), CONTEXT) as whole:
        expected = decoded(whole)
    with open_partly(
        demo_model_path(), 0.0, context_length=CONTEXT, ring_bytes=4 * MIB, prefetching=Prefetching(1, 8)
    ) as runner:
        assert np.array_equal(decoded(runner), expected)
        with monkeypatch.context() as patch:
            patch.setattr(DirectCopies, "begin", begin_late)
            patch.setattr(copies.driver, "cuMemcpyBatchAsync", refuse)
            with pytest.raises(DeviceError, match="cannot be copied"):
                runner.prefill(token_ids(300))
        assert np.array_equal(decoded(runner), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("cpu", ["none", "all"])
def test_a_file_that_shrinks_is_an_error(cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FL01: with the reading threads, and with the CPU's."""
    path = tmp_path / "demo.gguf"
    shutil.copyfile(demo_model_path(), path)
    monkeypatch.setattr(RegisteredMemory, "register", classmethod(lambda cls, *_, **__: None))
    monkeypatch.setattr(CpuShare, "split", CPU_SHARES[cpu])
    with open_partly(path, 0.0, context_length=CONTEXT, ring_bytes=4 * MIB) as runner:
        size = path.stat().st_size // 4
        # Later than a request looks whether it is the file that was opened.
        monkeypatch.setattr(GGUFFile, "check_unchanged", lambda self: os.truncate(path, size))
        with pytest.raises(ModelChangedError):
            outputs(runner, 168)


@pytest.mark.gpu
def test_prompts_leave_the_experts_of_decoding_alone(
    demo: dict[int, tuple[np.ndarray, np.ndarray]],
) -> None:
    """EX05: no expert is admitted or evicted, and the policy learns nothing."""
    with open_partly(demo_model_path(), 0.25, context_length=CONTEXT, ring_bytes=4 * MIB) as runner:
        cache = runner.expert_cache
        assert cache is not None
        before = cache.counters.copies.copy()
        for _ in range(3):
            runner.reset()
            runner.prefill(token_ids(500))
        assert np.array_equal(cache.counters.copies, before)
        assert cache.counters.hits.sum() + cache.counters.misses.sum() == 0
