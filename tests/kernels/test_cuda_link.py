"""Rates of the link between RAM and the GPU: what answers and what reads needs no GPU, the figures do."""

import itertools
import time
from collections import deque
from ctypes import c_uint32
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda_row_cases import check_compiles, for_each_architecture

from coldstream.errors import DeviceError
from coldstream.kernels.cuda import device, link
from coldstream.kernels.cuda.device import measure_copy_bandwidth
from coldstream.kernels.cuda.driver import driver_version
from coldstream.kernels.cuda.link import measure_handshake, measure_link, measure_products
from coldstream.kernels.cuda.runtime import allocations, calls


def test_the_server_answers_every_request_though_nothing_is_to_compute() -> None:
    words = np.zeros(32, np.uint32)
    request, done = words[:1], words[16:17]
    server = link._idle_server(request, done, 2)
    server.begin()
    for _ in range(100):
        done.fill(0)
        request.fill(link._ONE_ROW_OF_LAYER_0)
        deadline = time.monotonic() + 10
        while done[0] == 0:
            assert time.monotonic() < deadline
    server.end()
    server.check()


def test_a_handshake_raises_the_flag_after_the_last_answer_is_forgotten() -> None:
    operations = link._handshakes(0x1000, 0x2000)
    assert len(operations) == 3 * link._HANDSHAKES_PER_BATCH < 256
    kinds = driver.CUstreamBatchMemOpType
    write, wait = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
    for first in range(0, len(operations), 3):
        forget, ask, answer = operations[first : first + 3]
        assert [each.operation for each in (forget, ask, answer)] == [write, write, wait]
        assert [int(forget.writeValue.address), int(forget.writeValue.value)] == [0x2000, 0]
        assert [int(ask.writeValue.address), int(ask.writeValue.value)] == [0x1000, 1 | 1 << 16]
        assert [int(answer.waitValue.address), int(answer.waitValue.value)] == [0x2000, 1]
        assert [forget.writeValue.flags, ask.writeValue.flags, answer.waitValue.flags] == [0, 0, at_least]


class WaitingDevice:
    """Has operations of a stream done while somebody asks for them. It waits for the server's answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: deque[driver.CUstreamBatchMemOpParams] = deque()
        self.num_queued = 0
        self.is_deaf = self.is_served = False  # the server's: whether it never answers, and whether it runs
        self.handle = 0
        words = np.zeros(32, np.uint32)
        monkeypatch.setattr(link.allocations, "page_locked", lambda shape, dtype: words)
        monkeypatch.setattr(link, "_idle_server", lambda *of: self)
        monkeypatch.setattr(link.streams, "Stream", lambda: self)
        monkeypatch.setattr(link.streams, "Event", lambda **of: Reached(self))
        monkeypatch.setattr(driver, "cuStreamBatchMemOp", self.queue)

    def queue(self, stream: int, count: int, batch: list[Any], flags: int) -> tuple[driver.CUresult]:
        assert (stream, len(batch)) == (self.handle, count)
        self.queued.extend(batch)
        self.num_queued += count
        return (driver.CUresult.CUDA_SUCCESS,)

    def go_on(self, num_operations: int) -> None:
        for _ in range(min(num_operations, len(self.queued))):
            operation = self.queued[0]
            part = operation.writeValue
            if operation.operation == driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32:
                part = operation.waitValue
                answer = c_uint32.from_address(int(part.address))
                if self.is_served and not self.is_deaf:
                    answer.value = 1
                if answer.value < int(part.value):
                    return
            else:
                c_uint32.from_address(int(part.address)).value = int(part.value)
            self.queued.popleft()

    def begin(self) -> None:
        self.is_served = True

    def end(self) -> None:
        self.is_served = False

    def check(self) -> None:
        assert not self.is_served


class Reached:
    """An event of a device, which does some more of its work with each question."""

    def __init__(self, device: WaitingDevice) -> None:
        self.device, self.place = device, 0

    def record(self, stream: WaitingDevice) -> None:
        self.place = stream.num_queued

    def query(self) -> bool:
        self.device.go_on(100)
        return self.device.num_queued - len(self.device.queued) >= self.place

    def milliseconds_since(self, begin: "Reached") -> float:
        assert begin.place < self.place
        return 1.0


@pytest.mark.parametrize("when", ["queueing", "waiting", "too late"])
def test_a_measurement_that_ends_early_leaves_no_device_that_waits(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its memory could never be freed. Early is at Ctrl-C, and without an answer."""
    device, seconds = WaitingDevice(monkeypatch), itertools.count(step=link._LIMIT_S / 4)

    def interrupt(*of: object) -> None:
        raise KeyboardInterrupt

    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda seconds: None)
    monkeypatch.setattr(link, "time", clock)
    if when == "too late":
        device.is_deaf = True
    elif when == "waiting":
        clock.sleep = interrupt
    else:
        monkeypatch.setattr(link, "_check", lambda result: device.num_queued < 1000 or interrupt())
    with pytest.raises(DeviceError if when == "too late" else KeyboardInterrupt):
        measure_handshake(1)
    assert device.num_queued > 100
    assert not device.queued
    assert not device.is_served


def test_the_mean_of_handshakes_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = WaitingDevice(monkeypatch)
    assert measure_handshake(1) == 1e-3 / (link._NUM_BATCHES * link._HANDSHAKES_PER_BATCH)
    assert device.num_queued == 3 * (link._NUM_BATCHES + 1) * link._HANDSHAKES_PER_BATCH
    assert not device.queued


@for_each_architecture
def test_the_products_that_are_timed_compile(arch: str) -> None:
    check_compiles(link.PRODUCTS, arch)


@pytest.mark.usefixtures("gpu")
def test_rates_are_measured_by_what_a_model_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, where an event is always a millisecond behind another one; all memory is given back."""
    for name in ("BUFFER_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(link, name, 2**16)
    monkeypatch.setattr(device, "COPY_BYTES", 2**16)
    monkeypatch.setattr(link, "_PRODUCT_STEPS", 2)
    before = calls.free_memory()
    rates = measure_link(1, np.ones(2**20, np.uint8))
    assert rates.alone == 60 * 2**16 / 1e-3, "bursts of 0.03 s, by the first two passes"
    assert rates.beside_read == 100 * 2**16 / 1e-3, "bursts of a twentieth of a second"
    assert max(rates.windows) > 0  # not in each: other programs may have the processor
    assert measure_copy_bandwidth() == 2 * 2**16 / 1e-3
    # 12 blocks of 8 warps.
    assert measure_products() == pytest.approx(0.75 * 96 * 2 * 8 * (2 * 16 * 8 * 32) / 1e-3)
    allocations.trim()  # of what the device's pool keeps
    assert calls.free_memory() == before


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_has_all_rates() -> None:
    rates = measure_link(2, np.ones(2**28, np.uint8))
    assert 1e9 < rates.beside_read <= 1.1 * rates.alone < 1e12
    assert rates.read_beside > 1e8
    assert 1e-7 < measure_handshake(2) < 1e-3
    assert measure_copy_bandwidth() > rates.alone
    assert measure_products() > 1e12
    assert driver_version()[0].isdigit()
