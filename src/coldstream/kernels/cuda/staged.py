"""Device memory that the host writes before a step reads it, or reads after a step has written it."""

from typing import Any

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.contents import host_type
from coldstream.kernels.cuda.runtime import allocations, copies, streams

Array = np.ndarray[Any, Any]


class StagedMemory:
    """`values`, int32 [n] on the device, and a page-locked copy on the host.

    The transfer may be a part of a captured graph. Over a `MemoryPlan` there is none.
    """

    def __init__(self, values: DeviceArray) -> None:
        self.values = values
        self._staged = _page_locked(values)
        self.on_host: Array = self._staged

    def copy(self, count: int) -> None:
        """Queues the copy of the first `count` values, which reads the host's when it is executed.

        Raises DeviceError if the driver refuses it.
        """
        if not self.values.is_meta:
            copies.to_device(self.values.data_ptr(), self._staged[:count])


class StagedRing:
    """`values`, int32 [n] on the device, and NUM_COPIES page-locked copies on the host, used in turn.

    So the host may write what a later step reads while a transfer for an earlier one is still queued.
    """

    NUM_COPIES = 2

    def __init__(self, values: DeviceArray) -> None:
        self.values = values
        self._staged = [_page_locked(values) for _ in range(self.NUM_COPIES)]
        self._sent: list[streams.Event | None] = [None] * self.NUM_COPIES
        self._current = 0

    def next_on_host(self) -> Array:
        """The copy to write before the next `copy`, once its last transfer has been executed."""
        self._current = (self._current + 1) % self.NUM_COPIES
        sent = self._sent[self._current]
        if sent is not None:
            sent.synchronize()
        return self._staged[self._current]

    def copy(self, count: int) -> None:
        """Queues the transfer of the first `count` values written last. Raises as `StagedMemory.copy`."""
        if self.values.is_meta:
            return
        copies.to_device(self.values.data_ptr(), self._staged[self._current][:count])
        event = self._sent[self._current] = self._sent[self._current] or streams.Event()
        event.record(streams.current_stream())


class ReadBack:
    """`values` on the device, and NUM_COPIES page-locked copies on the host, used in turn.

    So the host may read what one step left while the next one writes over it on the device.
    """

    NUM_COPIES = 2

    def __init__(self, values: DeviceArray) -> None:
        self.values = values
        self._copies = [_page_locked(values) for _ in range(self.NUM_COPIES)]
        self._current = 0

    def copy(self) -> Array:
        """Queues the transfer of all values. They are in the result once it has been executed, until
        NUM_COPIES more calls.
        """
        self._current = (self._current + 1) % self.NUM_COPIES
        copied = self._copies[self._current]
        copies.to_host(copied, self.values.data_ptr())
        return copied


def _page_locked(values: DeviceArray) -> Array:
    """Host memory for all values; none for those of a `MemoryPlan`."""
    dtype = host_type(values.dtype)
    return np.empty(0, dtype) if values.is_meta else allocations.page_locked(tuple(values.shape), dtype)
