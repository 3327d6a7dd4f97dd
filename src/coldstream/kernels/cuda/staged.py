"""Device memory that the host writes before a step reads it."""

from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from coldstream.errors import DeviceError


class StagedMemory:
    """`values`, int32 [n] on the device, and a page-locked copy on the host.

    The transfer may be a part of a captured graph, which saves a call before it. Over a `MemoryPlan` there is
    none.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        is_there = not values.is_meta
        self._staged = torch.zeros(len(values) if is_there else 0, dtype=torch.int32, pin_memory=is_there)
        self.on_host: np.ndarray[Any, np.dtype[np.int32]] = self._staged.numpy()

    def copy(self, count: int) -> None:
        """Queues the copy of the first `count` values, which reads the host's when it is executed.

        Raises DeviceError if the driver refuses it.
        """
        if self.values.is_meta:
            return
        stream, size = torch.cuda.current_stream().cuda_stream, count * self.values.itemsize
        (status,) = driver.cuMemcpyHtoDAsync(self.values.data_ptr(), self._staged.data_ptr(), size, stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            reason = driver.cuGetErrorString(status)[1].decode()
            raise DeviceError(f"the inputs of a step cannot be copied to the GPU: {reason}")
