"""Measures rates between RAM and the GPU, alone and while CPU threads read, for placement."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.cuda.contents import new
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import allocations, copies, streams
from coldstream.kernels.memory_readers import MemoryReaders

BUFFER_BYTES = 128 * 2**20
PIECE_BYTES = 2 * 2**20  # about one expert of a 35B model
BURST_S = 0.03  # of copies at a time, which the device times
BURST_BESIDE_S = 0.05  # beside readers, which count by pieces
NUM_BURSTS = 3

# Products of large matrices by a library run at 0.80e15 on an H200, and those of the kernel here at 1.07e15.
_LARGE_MATRICES = 0.75
_NUM_PRODUCTS = 10
_PRODUCT_STEPS = 4096  # of a warp, in each of the kernel's chains
_PRODUCT_THREADS, _WARP_SIZE = 256, 32
_BLOCKS_PER_PROCESSOR = 4
_CHAINS = 8
_FRAGMENT_OPS = 2 * 16 * 8 * 32  # of a warp's product
_HANDSHAKES_PER_BATCH = 64  # three operations each, of 256 that a call takes
_NUM_BATCHES = 16
_LIMIT_S = 5.0
_WORDS_PER_LINE = 16
_ONE_ROW_OF_LAYER_0 = 1 | 1 << 16

PRODUCTS = CudaProgram(Path(__file__).with_name("product_rate.cu"), ("multiply_fragments",))

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second."""

    alone: float  # copies from page-locked RAM to the device
    beside_read: float  # the same while CPU threads read RAM
    read_beside: float  # what these threads read together during copies
    windows: Sequence[float] = ()  # what they read without copies: `MemoryReaders.windows`


def measure_link(num_threads: int, memory: Array) -> LinkRates:
    """Rates of copies of expert-sized pieces, beside `num_threads` readers; the best of three. Half a second.

    memory: what the threads read, beyond any cache. Raises DeviceError, OutOfMemoryError.
    """
    with device_errors():
        source = allocations.page_locked((BUFFER_BYTES,), "uint8")
        target = allocations.block(BUFFER_BYTES)
        _copy_for(source, target, 1)
        pass_s = _copy_for(source, target, 2) / 2
        num_passes = max(1, round(BURST_S / pass_s))
        num_beside = max(1, round(BURST_BESIDE_S / pass_s))
        alone = max(
            num_passes * BUFFER_BYTES / _copy_for(source, target, num_passes) for _ in range(NUM_BURSTS)
        )
        both = []
        with MemoryReaders.running(num_threads, memory) as readers:
            windows = readers.windows()
            for _ in range(NUM_BURSTS):
                before, start = readers.num_bytes, time.perf_counter()
                copied = num_beside * BUFFER_BYTES / _copy_for(source, target, num_beside)
                read = (readers.num_bytes - before) / (time.perf_counter() - start)
                both.append((copied + read, copied, read))
    _, beside_read, read_beside = max(both)
    return LinkRates(alone, beside_read, read_beside, windows)


def measure_handshake(num_threads: int) -> float:
    """Seconds for: the device raises a flag, the threads that compute experts answer it, the device goes on.

    The mean of 1024 handshakes in a stream, with nothing to compute. Raises DeviceError if the driver has no
    stream memory operations, or without an answer.
    """
    with device_errors():
        words = allocations.page_locked((2 * _WORDS_PER_LINE,), "uint32")
        request, done = (words[start : start + 1] for start in (0, _WORDS_PER_LINE))
        server = _idle_server(request, done, num_threads)
        batch = _handshakes(request.ctypes.data, done.ctypes.data)
        stream = streams.Stream()
        begin, end = (streams.Event(has_time=True) for _ in range(2))
        server.begin()
        try:
            for number in range(_NUM_BATCHES + 1):
                if number == 1:  # the first batch only wakes the threads
                    begin.record(stream)
                _check(driver.cuStreamBatchMemOp(stream.handle, len(batch), batch, 0))
            end.record(stream)
            _wait(end)
        except BaseException:
            _answer_all(stream, done)
            raise
        finally:
            server.end()
        server.check()
    return float(end.milliseconds_since(begin) / 1e3 / (_NUM_BATCHES * _HANDSHAKES_PER_BATCH))


def measure_products() -> float:
    """Int8 multiplications and additions per second in products of large matrices.

    What the tensor cores do with operands in registers, the best of twenty times, less what large matrices
    take besides.
    """
    num_blocks = _BLOCKS_PER_PROCESSOR * device_limits().num_processors
    with device_errors():
        out = new((num_blocks * _PRODUCT_THREADS,), "int32")
        kernel = PRODUCTS.kernel("multiply_fragments")
        times = []
        for _ in range(_NUM_PRODUCTS):
            begin, end = (streams.Event(has_time=True) for _ in range(2))
            begin.record()
            kernel.launch((num_blocks, 1, 1), _PRODUCT_THREADS, (out, _PRODUCT_STEPS))
            end.record()
            end.synchronize()
            times.append(end.milliseconds_since(begin) / 1e3)
    num_warps = num_blocks * _PRODUCT_THREADS // _WARP_SIZE
    return float(_LARGE_MATRICES * num_warps * _PRODUCT_STEPS * _CHAINS * _FRAGMENT_OPS / min(times))


def _copy_for(source: Array, target: allocations.Allocation, num_passes: int) -> float:
    """Seconds for `num_passes` copies of the whole buffer, piece by piece."""
    begin, end = (streams.Event(has_time=True) for _ in range(2))
    begin.record()
    for _ in range(num_passes):
        for start in range(0, BUFFER_BYTES, PIECE_BYTES):
            copies.to_device(target.address + start, source[start : start + PIECE_BYTES])
    end.record()
    end.synchronize()
    return float(end.milliseconds_since(begin) / 1e3)


def _idle_server(request: Array, done: Array, num_threads: int) -> _csrc.ExpertServer:
    """The server that decoding uses, with one expert, and a mailbox without a pair for it."""
    runtime = _csrc.Runtime(num_threads)
    rows, ids = np.zeros((1, 32), np.float32), np.full((1, 1), -1, np.int32)
    out = np.zeros((1, 1, 32), np.float32)
    server = _csrc.ExpertServer(runtime, request, done, rows, ids, out)
    weight = _csrc.Weight.from_array(np.zeros(32 * 32 * 4, np.uint8), QuantType.F32, 32, 32)
    server.add_layer(weight, weight, weight)
    return server


def _handshakes(request: int, done: int) -> list["driver.CUstreamBatchMemOpParams"]:
    """The operations of a batch of handshakes: clear `done`, write a request, wait for `done`."""
    kinds = driver.CUstreamBatchMemOpType
    write, wait = (kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32)
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
    operations = []
    for _ in range(_HANDSHAKES_PER_BATCH):
        for kind, address, value in (
            (write, done, 0),
            (write, request, _ONE_ROW_OF_LAYER_0),
            (wait, done, 1),
        ):
            operation = driver.CUstreamBatchMemOpParams()
            operation.operation = kind
            part = operation.waitValue if kind == wait else operation.writeValue
            part.operation = kind
            part.address, part.value = driver.CUdeviceptr(address), driver.cuuint32_t(value)
            part.flags = at_least if kind == wait else 0
            operations.append(operation)
    return operations


def _wait(event: streams.Event) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not event.query():
        if time.monotonic() > deadline:
            raise DeviceError(
                "the CPU does not see the GPU's flags: experts that do not fit cannot be computed"
            )
        time.sleep(1e-4)


def _answer_all(stream: streams.Stream, done: Array) -> None:
    """Answers in place of a server that ends, as the device would wait for it forever."""
    last = streams.Event()
    last.record(stream)
    while not last.query():
        done.fill(1)


def _check(result: tuple[object, ...]) -> None:
    status = result[0]
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the GPU driver refused: {driver.cuGetErrorString(status)[1].decode()}")
