"""Streams, events, graphs and memory of the device, on the host's driver and on a GPU's."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from cuda.bindings import driver

from coldstream.errors import DeviceError, OutOfMemoryError
from coldstream.kernels.cuda.runtime import allocations, calls, copies, streams
from coldstream.kernels.cuda.runtime.calls import checked
from coldstream.kernels.cuda.runtime.graphs import Graph, Pieces, between, recording
from coldstream.kernels.cuda.runtime.streams import current_stream, on_stream

LENGTH = 2**20  # bytes: a copy of them takes a while
GPU = pytest.mark.gpu

pytestmark = pytest.mark.usefixtures("driver")


def values_of(allocation: allocations.Allocation) -> np.ndarray:
    values = np.empty(allocation.num_bytes, np.uint8)
    copies.to_host(values, allocation.address)
    current_stream().synchronize()
    return values


def test_bytes_go_to_the_device_and_back() -> None:
    values = np.arange(1000, dtype=np.int32)
    there, copy = allocations.block(values.nbytes), allocations.scratch(values.nbytes)
    copies.to_device_at_once(there.address, values)
    copies.within_device(copy.address, there.address, values.nbytes)
    np.testing.assert_array_equal(values_of(copy).view(np.int32), values)


def test_fills() -> None:
    there = allocations.block(12)
    copies.fill_bytes(there.address, 7, 12)
    copies.fill_words(there.address + 4, 0x3F800000, 1)
    values = values_of(there)
    np.testing.assert_array_equal(values[[0, 3, 8, 11]], 7)
    assert values[4:8].view(np.float32)[0] == 1.0


def test_page_locked_memory_is_zero_and_the_device_writes_it() -> None:
    values, there = allocations.page_locked((3, 5), "int64"), allocations.block(120)
    assert values.shape == (3, 5)
    assert not values.any()
    copies.fill_bytes(there.address, 1, 120)
    copies.to_host(values, there.address)
    current_stream().synchronize()
    np.testing.assert_array_equal(values, 0x0101010101010101)


def test_a_view_keeps_page_locked_memory() -> None:
    view = allocations.page_locked((1000,), "uint8")[10:20].reshape(2, 5)
    view[:] = 3
    others = [allocations.page_locked((1000,), "uint8") for _ in range(50)]
    np.testing.assert_array_equal(view, 3)
    del others


def test_streams_wait_for_each_other() -> None:
    first, second, reached = streams.Stream(), streams.Stream(), streams.Event()
    source, target = allocations.block(LENGTH), allocations.block(LENGTH)
    found = allocations.page_locked((LENGTH,), "uint8")
    copies.fill_bytes(source.address, 0, LENGTH)
    first.wait_stream(current_stream())
    with on_stream(first):
        assert current_stream() is first
        for byte in range(50):
            copies.fill_bytes(source.address, byte, LENGTH)
        reached.record()
    second.wait_event(reached)
    with on_stream(second):
        copies.within_device(target.address, source.address, LENGTH)
        copies.to_host(found, target.address)
    second.synchronize()
    np.testing.assert_array_equal(found, 49)
    assert reached.query()


def test_events_keep_their_time() -> None:
    begin, end = streams.Event(has_time=True), streams.Event(has_time=True)
    begin.record()
    end.record()
    end.synchronize()
    assert end.milliseconds_since(begin) >= 0


def test_an_event_that_was_never_recorded_counts_as_reached() -> None:
    event = streams.Event()
    event.synchronize()
    assert event.query()


def test_scratch_is_reused_in_the_order_of_the_work() -> None:
    found = allocations.page_locked((64, LENGTH), "uint8")
    for byte, row in enumerate(found):
        there = allocations.scratch(LENGTH)
        copies.fill_bytes(there.address, byte, LENGTH)
        copies.to_host(row, there.address)
        del there  # before the work has run
    current_stream().synchronize()
    np.testing.assert_array_equal(found[:, ::4096], np.repeat(np.arange(64)[:, None], LENGTH // 4096, 1))


def test_a_graph_runs_again_with_what_it_reads_then() -> None:
    host, there, second = allocations.page_locked((4,), "int32"), allocations.block(16), allocations.block(16)
    side = streams.Stream()

    def step() -> str:
        side.wait_stream(current_stream())
        with on_stream(side):
            copies.to_device(there.address, host)
        current_stream().wait_stream(side)
        copies.within_device(second.address, there.address, 16)
        return "outputs"

    copies.fill_bytes(second.address, 0, 16)
    graph, outputs = Graph.capture(step)
    assert outputs == "outputs"
    np.testing.assert_array_equal(values_of(second), 0)  # nothing has run
    for number in (3, 4):
        host[:] = number
        graph.launch()
        np.testing.assert_array_equal(values_of(second).view(np.int32), number)


def test_memory_that_a_captured_step_lets_go_is_freed_behind_it() -> None:
    there, held = allocations.block(16), [allocations.scratch(16), allocations.block(16)]
    pinned = [allocations.page_locked((4,), "int32"), allocations.page_locked((4,), "int32")]

    def step() -> None:
        held.clear()
        pinned.pop()
        copies.fill_bytes(there.address, 5, 16)

    graph, _ = Graph.capture(step)
    graph.launch()
    np.testing.assert_array_equal(values_of(there), 5)


def test_nothing_is_allocated_within_a_capture() -> None:
    for take in (
        allocations.block,
        allocations.scratch,
        lambda size: allocations.page_locked((size,), "int8"),
    ):
        with pytest.raises(AssertionError, match="belongs to who captures"):
            Graph.capture(lambda take=take: take(16))
    test_a_graph_runs_again_with_what_it_reads_then()


def test_a_step_that_fails_leaves_no_capture_behind() -> None:
    def fail() -> None:
        copies.fill_bytes(there.address, 5, 16)
        raise KeyError("own")

    there = allocations.block(16)
    copies.fill_bytes(there.address, 1, 16)
    with pytest.raises(KeyError, match="own"):
        Graph.capture(fail)
    np.testing.assert_array_equal(values_of(there), 1)
    test_a_graph_runs_again_with_what_it_reads_then()


def test_pieces_run_in_their_order_with_what_the_host_does_between() -> None:
    """Which may wait, allocate, and launch a graph as often as it likes."""
    host, back = (allocations.page_locked((4,), "int32") for _ in range(2))
    there, copy = allocations.block(16), allocations.block(16)
    acts: list[str] = []

    def answer() -> None:
        current_stream().synchronize()
        acts.append("answer")
        allocations.scratch(16)
        host[:] = 2 * back

    def repeat(graph: Graph) -> None:
        acts.append("repeat")
        for byte in (7, 9):
            copies.fill_bytes(there.address + 12, byte, 4)
            graph.launch()

    def step() -> str:
        copies.to_device(there.address, host)
        copies.to_host(back, there.address)
        between(answer)
        copies.to_device(there.address, host)
        current = recording()
        assert current is not None
        current.pause_with(lambda: copies.within_device(copy.address, there.address, 16), repeat)
        copies.fill_bytes(there.address, 0, 16)
        return "outputs"

    host[:] = 3
    pieces, outputs = Pieces.record(step)
    assert outputs == "outputs"
    assert recording() is None
    for number in (3, 4, 5):
        np.testing.assert_array_equal(values_of(copy).view(np.int32), [2 * number] * 3 + [0x09090909])
        np.testing.assert_array_equal(values_of(there), 0)
        host[:] = number + 1
        pieces.launch()
    assert acts == ["answer", "repeat"] * 4


def test_what_comes_between_is_done_at_once_where_nothing_is_recorded() -> None:
    acts: list[int] = []
    between(lambda: acts.append(1))
    assert acts == [1]


@pytest.mark.parametrize("fails", ["step", "act", "again"])
def test_pieces_that_fail_leave_no_recording_behind(fails: str) -> None:
    there = allocations.block(16)

    def fail(name: str) -> None:
        if fails == name:
            raise KeyError("own")

    def step() -> None:
        copies.fill_bytes(there.address, 5, 16)
        between(lambda: fail("act"))
        current = recording()
        assert current is not None
        current.pause_with(lambda: fail("again"), lambda graph: None)
        fail("step")

    with pytest.raises(KeyError, match="own"):
        Pieces.record(step)
    assert recording() is None
    assert not calls.is_capturing()
    np.testing.assert_array_equal(values_of(there), 5)  # the first piece has run
    test_pieces_run_in_their_order_with_what_the_host_does_between()


def test_threads_have_their_own_current_stream() -> None:
    own, seen = streams.Stream(), []

    def run() -> None:
        seen.append(current_stream())
        there = allocations.block(16)
        copies.fill_bytes(there.address, 9, 16)
        seen.append(values_of(there)[0])

    with on_stream(own):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen[0] is not own
    assert seen[1] == 9


@pytest.mark.alone
def test_what_does_not_fit_is_an_error_with_the_next_step_and_costs_nothing() -> None:
    def refused() -> int:
        with pytest.raises(OutOfMemoryError, match=r"GiB are free.*--ctx-size"):
            allocations.block(2**50)
        return calls.free_memory()[0]

    gc.collect()
    before = refused()  # which frees what earlier tests left in the pool
    assert {refused() for _ in range(20)} == {before}


@pytest.mark.sharded(of="kernels")
@pytest.mark.alone
def test_memory_is_flat_to_the_byte() -> None:
    def use() -> None:
        held = [allocations.block(size) for size in (1, 2**20 + 1, 2**26)]
        held += [allocations.scratch(size) for size in (1, 2**25)]
        graph, _ = Graph.capture(lambda: copies.fill_bytes(held[0].address, 0, 1))
        graph.launch()
        streams.Stream().synchronize()
        streams.Event().synchronize()

    use()
    allocations.trim()
    before = calls.free_memory()[0]
    for _ in range(100):
        use()
    allocations.trim()
    assert calls.free_memory()[0] == before


@pytest.mark.parametrize("driver", [pytest.param("gpu", marks=GPU)], indirect=True)
class TestProcess:
    """What is decided for a process; only a real driver shows it."""

    def test_a_second_context_beside_ours(self) -> None:
        there = allocations.block(16)
        copies.fill_bytes(there.address, 1, 16)
        other = checked(driver.cuCtxCreate(None, 0, calls.DEVICE))
        checked(driver.cuCtxPopCurrent())
        copies.fill_bytes(there.address, 2, 16)
        np.testing.assert_array_equal(values_of(there), 2)
        checked(driver.cuCtxDestroy(other))
        np.testing.assert_array_equal(values_of(there), 2)

    def test_pytorch_sees_the_same_memory(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.arange(4, dtype=torch.int32, device="cuda")
        there = allocations.block(16)
        copies.within_device(there.address, tensor.data_ptr(), 16)
        np.testing.assert_array_equal(values_of(there).view(np.int32), np.arange(4))

    def test_a_forked_child_is_refused_and_frees_nothing(self) -> None:
        text = run_script(
            """
there = allocations.block(16)
copies.fill_bytes(there.address, 6, 16)
child = os.fork()
if child == 0:
    del there
    try:
        allocations.block(16)
    except GenerationFault as error:
        print(error, flush=True)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), values_of(there)[0])
"""
        )
        assert "before fork()" in text
        assert text.split()[-2:] == ["3", "6"]

    def test_the_interpreter_ends_with_work_in_flight(self) -> None:
        text = run_script(
            """
source, target = allocations.block(2**28), allocations.block(2**28)
for each in (source, target):
    copies.fill_bytes(each.address, 1, 2**28)
host = allocations.page_locked((2**26,), "uint8")
graph, _ = Graph.capture(lambda: copies.within_device(target.address, source.address, 2**28))
for _ in range(200):
    graph.launch()
    copies.to_host(host, target.address)
event = streams.Event()
event.record()
print("in flight", not event.query())
"""
        )
        assert text == "in flight True\n"


def run_script(body: str) -> str:
    """What a process prints that ends by itself, without a word of errors."""
    lines = (
        "import os, sys",
        "sys.path.insert(0, 'tests/kernels')",
        "sys.path.insert(0, 'tests')",
        "from coldstream.errors import GenerationFault",
        "from coldstream.kernels.cuda.runtime import allocations, copies",
        "from coldstream.kernels.cuda.runtime.graphs import Graph",
        "from coldstream.kernels.cuda.runtime import streams",
        "from test_cuda_runtime import values_of",
    )
    command = [sys.executable, "-W", "ignore", "-c", "\n".join([*lines, body])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (process.returncode, process.stderr) == (0, ""), process.stderr
    return process.stdout


def test_errors_say_whether_work_is_lost() -> None:
    statuses = driver.CUresult
    assert "start it again" in str(calls.failure_of(statuses.CUDA_ERROR_ILLEGAL_ADDRESS))
    refused = calls.failure_of(statuses.CUDA_ERROR_INVALID_VALUE)
    assert isinstance(refused, DeviceError)
    assert str(refused).startswith("the GPU driver refused: ")
