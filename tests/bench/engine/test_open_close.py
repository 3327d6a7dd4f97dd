"""A GPU's model opened and closed many times: nothing stays of it; and what stays is found."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from bench.engine.open_close import (
    HOST_STEP,
    RSS_BYTES_PER_CYCLE,
    Answers,
    Records,
    Work,
    demo_kinds,
    measure,
)
from builders import SMALL_EXPERTS, write_gguf
from coldstream.engine import EngineConfig
from coldstream.engine.opened_model import OpenedModel
from coldstream.kernels.cuda.runtime import allocations, copies, streams
from coldstream.kernels.cuda.runtime.graphs import Graph
from dflash_cases import write_drafter
from host_device import HostDevice
from host_driver import HostDriver
from host_gpu import opened_on

DIMS = replace(SMALL_EXPERTS, context=2**16, experts=64, experts_used=3)
LITTLE = Work((3, 40), 3)


@pytest.fixture
def driver(compiled_for_the_host: HostDevice) -> Iterator[HostDriver]:
    with opened_on(compiled_for_the_host):
        yield compiled_for_the_host.driver


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    (path,) = write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", dims=DIMS)
    return EngineConfig(str(path), device="cuda", ctx_size=128, spec_type="none", threads=1)


@contextmanager
def no_memory_left(driver: HostDriver) -> Iterator[None]:
    allocations.trim()
    total, driver.total_bytes = driver.total_bytes, driver.taken_bytes
    try:
        yield
    finally:
        driver.total_bytes = total


@pytest.mark.sharded(of="measurements")
def test_nothing_stays(driver: HostDriver, resident: EngineConfig, tmp_path: Path) -> None:
    partial = {"prefetch": 1}
    drafts = {"spec_type": "dflash", "model_draft": str(write_drafter(tmp_path, DIMS)), "tree_budget": 3}
    kinds = {
        "resident": resident,
        "partial": replace(resident, **partial),
        "partial, dflash": replace(resident, **partial, **drafts),
    }
    found = measure(kinds, 3, 5, LITTLE, lambda: no_memory_left(driver))
    assert found["changed"] == {}
    assert {first["device_bytes"] for first in found["after_warm_up"].values()} == {0}
    assert not driver.registered
    assert [each["count"] for each in found["refusals"].values()] == [1] * 5
    assert [ran["prefetched"] for ran in found["kinds"].values()] == [0, 1, 1]
    assert found["kinds"]["partial, dflash"]["drafter"] == "dflash"


def memory_map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def thread(end: threading.Event) -> threading.Thread:
    waiting = threading.Thread(target=end.wait)
    waiting.start()
    return waiting


@dataclass(frozen=True)
class Leaking(Work):
    """Keeps something in each cycle."""

    lengths: tuple[int, ...] = (3,)
    num_tokens: int = 1
    leak: Callable[[], object] = object
    kept: list[object] = field(default_factory=list)

    def answers(self, opened: OpenedModel) -> Answers:
        self.kept.append(self.leak())
        return super().answers(opened)


@pytest.mark.sharded(of="measurements")
def test_what_stays_is_found(driver: HostDriver, resident: EngineConfig) -> None:
    end = threading.Event()
    target = allocations.block(1)
    leaks: dict[str, Callable[[], object]] = {
        "allocated_bytes": lambda: allocations.block(7),
        "pool_used_bytes": lambda: allocations.scratch(7),
        "page_locked_bytes": lambda: allocations.page_locked((7,), "uint8"),
        "mapped_model_files": lambda: memory_map(Path(resident.model)),
        "streams": streams.Stream,
        "events": streams.Event,
        "graphs": lambda: Graph.capture(lambda: copies.fill_bytes(target.address, 1, 1)),
        "threads": lambda: thread(end),
        "descriptors": lambda: os.open(os.devnull, os.O_RDONLY),
    }
    work = Leaking(leak=lambda: [leak() for leak in leaks.values()])
    try:
        found = measure({"resident": resident}, 2, 0, work, lambda: no_memory_left(driver))
    finally:
        end.set()
        for kept in work.kept:
            os.close(kept[-1])
    assert {*leaks} <= {*found["changed"]} <= {*leaks, "device_bytes", "pool_reserved_bytes"}
    assert not found["is_flat"]
    assert {*leaks} <= {*found["grown"]}


@pytest.mark.parametrize(
    ("growth", "is_flat"), [(RSS_BYTES_PER_CYCLE // 2, True), (2 * RSS_BYTES_PER_CYCLE, False)]
)
@pytest.mark.parametrize("before", [0, 20 * RSS_BYTES_PER_CYCLE])
def test_memory_of_the_host_may_grow_by_little_once_it_has_settled(
    driver: HostDriver, growth: int, is_flat: bool, before: int
) -> None:
    records = Records()
    for values in records.host.values():
        values += [HOST_STEP * before * number for number in range(4)]
        values += [values[-1] + HOST_STEP * growth * number for number in range(1, 6)]
    assert records.is_flat == is_flat


@pytest.mark.parametrize(
    ("values", "is_flat"),
    [
        ([7, 7, 9, 7], True),
        ([7, 6, 9, 7], True),
        ([7, 9, 8, 7], True),
        ([7, 7, 9, 8], False),
        ([7, 10, 9, 7], False),
    ],
)
def test_the_driver_may_give_memory_back(driver: HostDriver, values: list[int], is_flat: bool) -> None:
    """After a kind of cycle there is never more than at first, after a refusal never more than after any."""
    records = Records()
    records.first = {"resident": {"device_bytes": 7}, "partial": {"device_bytes": 9}}
    records.after = ["resident", "no memory", "partial", "resident"]
    records.values = {"device_bytes": values}
    assert records.is_flat == is_flat
    assert ("device_bytes" in records.grown) == (not is_flat)


@pytest.mark.sharded(of="measurements")
def test_an_opening_that_is_not_refused_is_an_error(driver: HostDriver, resident: EngineConfig) -> None:
    with pytest.raises(RuntimeError, match="no memory for weights: the model was opened"):
        measure({"resident": resident}, 1, 1, LITTLE, nullcontext)


@pytest.mark.sharded(of="measurements")
def test_other_tokens_than_before_are_an_error(driver: HostDriver, resident: EngineConfig) -> None:
    answers = iter([((1,),), ((2,),)])

    class Other(Work):
        def answers(self, opened: OpenedModel) -> Answers:
            opened.close()
            return next(answers)

    with pytest.raises(RuntimeError, match="resident: other tokens"):
        measure({"resident": resident}, 1, 0, Other(), lambda: no_memory_left(driver))


@pytest.mark.gpu
@pytest.mark.alone
def test_nothing_stays_of_the_bundled_model_on_a_gpu() -> None:
    found = measure(demo_kinds(), 12, 10)
    assert found["is_flat"], found["changed"]
