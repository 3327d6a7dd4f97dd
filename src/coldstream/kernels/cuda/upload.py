"""Tensors of a file into device memory, as fast as the file can be read.

Several threads read (`pread` releases the interpreter's lock) into page-locked buffers, from which the copy
engine transfers.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from coldstream.errors import ModelChangedError
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cuda.array import DeviceArray, HostArray
from coldstream.kernels.cuda.runtime import allocations, calls, copies, streams

PIECE_BYTES = 16 * 2**20
NUM_READERS = 8

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Upload:
    """The bytes of a tensor of a file, and their target: uint8 of that size, on the device or the host."""

    file: GGUFFile
    info: TensorInfo
    destination: DeviceArray


def run_uploads(
    uploads: Iterable[Upload], progress: Progress | None = None, device: int = calls.DEVICE
) -> None:
    """Copies everything to memory of `device`, on which the caller's work is, and waits for it.

    progress is called with (done, total) bytes.

    Raises ModelChangedError if the file ends early.
    """
    pieces = [
        (upload, start, min(PIECE_BYTES, upload.info.num_bytes - start))
        for upload in uploads
        for start in range(0, upload.info.num_bytes, PIECE_BYTES)
    ]
    total, done = sum(size for _, _, size in pieces), 0
    readers = _Readers()
    with ThreadPoolExecutor(NUM_READERS, initializer=calls.use_device, initargs=(device,)) as pool:
        for size in pool.map(lambda piece: readers.copy(*piece), pieces):
            done += size
            if progress is not None:
                progress(done, total)
    calls.synchronize()


class _Readers:
    """Page-locked buffers with a stream each, as many as are in use at once.

    They are freed with this object, by the caller's thread. A finalizer that runs while its thread ends would
    make a thread-local value of the runtime anew, which then stays.
    """

    def __init__(self) -> None:
        self._idle = deque[tuple[Array, streams.Stream]]()

    def copy(self, upload: Upload, start: int, size: int) -> int:
        if isinstance(upload.destination, HostArray):
            _read(upload.file, upload.info, start, upload.destination.numpy()[start : start + size].data)
            return size
        try:
            buffer, stream = self._idle.pop()
        except IndexError:
            buffer, stream = allocations.page_locked((PIECE_BYTES,), "uint8"), streams.Stream()
        try:
            part = buffer[:size]
            _read(upload.file, upload.info, start, part.data)
            copies.to_device(upload.destination.data_ptr() + start, part, stream)
            stream.synchronize()
        finally:
            self._idle.append((buffer, stream))
        return size


def _read(file: GGUFFile, info: TensorInfo, start: int, target: memoryview) -> None:
    descriptor, done = file.descriptor(info.shard), 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], info.offset + start + done)
        except OSError as error:
            raise ModelChangedError(
                f"{info.name}: {file.paths[info.shard]} cannot be read: {error}"
            ) from error
        if count == 0:
            raise ModelChangedError(f"{info.name}: {file.paths[info.shard]} shrank: load it again")
        done += count
