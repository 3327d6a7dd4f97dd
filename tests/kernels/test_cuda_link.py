"""Rates of the link between RAM and the GPU: what answers and what reads needs no GPU, the figures do."""

import time

import numpy as np
import pytest
from cuda.bindings import driver
from cuda_row_cases import check_compiles, for_each_architecture

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
    rates = measure_link(1, 2**20)
    assert rates.alone == 60 * 2**16 / 1e-3, "bursts of 0.03 s, by the first two passes"
    assert rates.beside_read == 200 * 2**16 / 1e-3, "bursts of a tenth of a second"
    assert measure_copy_bandwidth() == 2 * 2**16 / 1e-3
    # 12 blocks of 8 warps.
    assert measure_products() == pytest.approx(0.75 * 96 * 2 * 8 * (2 * 16 * 8 * 32) / 1e-3)
    allocations.trim()  # of what the device's pool keeps
    assert calls.free_memory() == before


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_has_all_rates() -> None:
    rates = measure_link(2, 2**28)
    assert 1e9 < rates.beside_read <= 1.1 * rates.alone < 1e12
    assert rates.read_beside > 1e8
    assert 1e-7 < measure_handshake(2) < 1e-3
    assert measure_copy_bandwidth() > rates.alone
    assert measure_products() > 1e12
    assert driver_version()[0].isdigit()
