"""What a plan in three tiers says is what runs: slots, bytes, page-locked memory, and the bits of the CPU."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids

from bench.runners import open_model_file
from builders import Dims, write_gguf
from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.cuda.runtime import allocations
from coldstream.kernels.cuda.upload import PIECE_BYTES
from coldstream.models.cuda.runner import CudaRunner
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Sources, plan_model
from host_device import HostDevice
from host_gpu import gpu_on

CONTEXT = 256
MIB = 2**20
GPU = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
MACHINE = Hardware("a CPU", ("avx2",), 3, 3, 2**35, 2**33, 5e10, GPU)
STAGED_BYTES = MIB  # inputs and results of steps, which the reserve is for


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = {"*_exps.weight": "Q4_K", "blk.1.ffn_down_exps.weight": "Q6_K"}
    dims = Dims(layers=2, interval=2, experts=48, experts_used=3)
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_gguf(path, types=dict(reversed(types.items())), dims=dims)[0]


class LockedMemory:
    """Counts page-locked memory but for buffers of uploads, and registered memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        self.registered: list[int] = []
        page_locked = allocations.page_locked

        def counted(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
            memory = page_locked(shape, dtype)
            if memory.nbytes != PIECE_BYTES:
                self.num_bytes += memory.nbytes
            return memory

        patch.setattr(allocations, "page_locked", counted)
        register = RegisteredMemory.register

        def registered(address: int, num_bytes: int, **options: Any) -> RegisteredMemory | None:
            self.registered.append(num_bytes)
            return register(address, num_bytes, **options)

        patch.setattr(RegisteredMemory, "register", registered)


@pytest.fixture
def locked(compiled_for_the_host: HostDevice) -> Iterator[LockedMemory]:
    with gpu_on(compiled_for_the_host), pytest.MonkeyPatch.context() as patch:
        yield LockedMemory(patch)


def planned(path: Path, config: EngineConfig) -> RunPlan:
    file, spec = open_model_file(path)
    with file:
        return plan_model(config, Sources(file, spec, MACHINE)).run


def advised(path: Path, config: EngineConfig, name: str) -> int:
    with pytest.raises(OutOfMemoryError) as caught:
        planned(path, replace(config, **{name: MIB}))  # type: ignore[arg-type]
    found = re.search(rf"try --{name} (\d+)M", str(caught.value))
    assert found
    return int(found[1]) * MIB


@pytest.mark.parametrize("more_bytes", [0, 3 * MIB])
def test_a_plan_is_what_runs(path: Path, locked: LockedMemory, more_bytes: int) -> None:
    config = EngineConfig("m", device="cuda", ctx_size=CONTEXT, vram=2**40)
    config = replace(config, vram=advised(path, config, "vram") + 2 * MIB)
    plan = planned(path, replace(config, ram=advised(path, config, "ram") + more_bytes))
    pool = plan.pool
    assert pool is not None
    file, spec = open_model_file(path)
    with (
        open_cpu(path, threads=1, context_length=CONTEXT) as plain,
        OneSequence(CudaRunner.load(file, spec, plan)) as runner,
    ):
        disk = runner.disk
        assert disk is not None
        assert (disk.num_slots, disk.slot_bytes) == (pool.num_slots, pool.slot_bytes)
        assert locked.registered == [pool.slot_bytes]
        for length in (90, 3):
            for each in (runner, plain):
                each.reset()
                each.prefill(token_ids(length))
            for token in (3, 1, 2):
                assert np.array_equal(runner.decode(token), plain.decode(token))
        assert runner.disk.bytes_read > disk.bytes_read
        assert pool.fixed.buffers <= locked.num_bytes + STAGED_BYTES
        assert locked.num_bytes <= pool.fixed.buffers + STAGED_BYTES
