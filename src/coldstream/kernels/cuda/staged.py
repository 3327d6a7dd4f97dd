"""Device memory that the host writes before a step reads it, or reads after a step has written it."""

from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from coldstream.errors import DeviceError

Array = np.ndarray[Any, np.dtype[np.int32]]


class StagedMemory:
    """`values`, int32 [n] on the device, and a page-locked copy on the host.

    The transfer may be a part of a captured graph. Over a `MemoryPlan` there is none.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._staged = _page_locked(values)
        self.on_host: Array = self._staged.numpy()

    def copy(self, count: int) -> None:
        """Queues the copy of the first `count` values, which reads the host's when it is executed.

        Raises DeviceError if the driver refuses it.
        """
        if not self.values.is_meta:
            _queue_copy(self._staged, self.values, count)


class StagedRing:
    """`values`, int32 [n] on the device, and NUM_COPIES page-locked copies on the host, used in turn.

    So the host may write what a later step reads while a transfer for an earlier one is still queued.
    """

    NUM_COPIES = 2

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._staged = [_page_locked(values) for _ in range(self.NUM_COPIES)]
        self._sent: list[torch.cuda.Event | None] = [None] * self.NUM_COPIES
        self._current = 0

    def next_on_host(self) -> Array:
        """The copy to write before the next `copy`, once its last transfer has been executed."""
        self._current = (self._current + 1) % self.NUM_COPIES
        sent = self._sent[self._current]
        if sent is not None:
            sent.synchronize()
        array: Array = self._staged[self._current].numpy()
        return array

    def copy(self, count: int) -> None:
        """Queues the transfer of the first `count` values written last. Raises as `StagedMemory.copy`."""
        if self.values.is_meta:
            return
        _queue_copy(self._staged[self._current], self.values, count)
        event = self._sent[self._current] = self._sent[self._current] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())


class ReadBack:
    """`values`, int32 [n] on the device, and NUM_COPIES page-locked copies on the host, used in turn.

    So the host may read what one step left while the next one writes over it on the device.
    """

    NUM_COPIES = 2

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._copies = [_page_locked(values) for _ in range(self.NUM_COPIES)]
        self._current = 0

    def copy(self) -> Array:
        """Queues the transfer of all values. They are in the result once it has been executed, until
        NUM_COPIES more calls.
        """
        self._current = (self._current + 1) % self.NUM_COPIES
        copied = self._copies[self._current]
        copied.copy_(self.values, non_blocking=True)
        array: Array = copied.numpy()
        return array


def _page_locked(values: torch.Tensor) -> torch.Tensor:
    """Host memory for all values; none for those of a `MemoryPlan`."""
    is_there = not values.is_meta
    return torch.zeros(len(values) if is_there else 0, dtype=torch.int32, pin_memory=is_there)


def _queue_copy(source: torch.Tensor, target: torch.Tensor, count: int) -> None:
    stream, size = torch.cuda.current_stream().cuda_stream, count * target.itemsize
    (status,) = driver.cuMemcpyHtoDAsync(target.data_ptr(), source.data_ptr(), size, stream)
    if status != driver.CUresult.CUDA_SUCCESS:
        reason = driver.cuGetErrorString(status)[1].decode()
        raise DeviceError(f"the inputs of a step cannot be copied to the GPU: {reason}")
