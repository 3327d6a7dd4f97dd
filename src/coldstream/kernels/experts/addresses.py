"""Changes to tables of addresses between two steps: one launch, however many tables they are in."""

from pathlib import Path

import numpy as np
import torch

from coldstream.kernels.cuda.program import CudaProgram

PROGRAM = CudaProgram(Path(__file__).with_name("write_addresses.cu"), ("write_addresses",))
THREADS = 256


class AddressWriter:
    """Page-locked memory for up to `capacity` changes at once, which the device reads over the bus."""

    def __init__(self, capacity: int) -> None:
        self._entries = torch.zeros((capacity, 2), dtype=torch.int64, pin_memory=True)

    def write(
        self,
        where: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        values: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    ) -> None:
        """Queues values[i] to the int64 at device address where[i], int64 [n] each.

        The launch of the last call must have run. ValueError beyond the capacity.
        """
        count = len(where)
        if count > len(self._entries):
            raise ValueError(f"{count} changes at once, but at most {len(self._entries)}")
        entries = self._entries.numpy()
        entries[:count, 0], entries[:count, 1] = where, values
        grid = (-(-count // THREADS), 1, 1)
        PROGRAM.kernel("write_addresses").launch(grid, THREADS, (self._entries, count))
