"""Sums of the times at which the parts of a layer begin and end, which kernels add up in device memory.

Only for steps whose router is a single launch (up to eight rows) and shares pairs out. One thread of a kernel
adds without waiting for the result; the host copies the sums only in `read_stamps`.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]

# What a step adds: 1, then times in nanoseconds of the device's clock.
SUMS = ("steps", "router_begins", "router_ends", "combine_begins", "answered", "combine_ends")

# `LayerStamps` of cuda/stamps.cuh.
LAYER_STAMPS = np.dtype(
    [
        ("router", np.uint64, 3),  # of the running step
        ("bus_pairs", np.uint64),
        ("sums", np.uint64, (2, len(SUMS))),  # of steps without and with pairs read over the bus
    ]
)
WORDS = LAYER_STAMPS.itemsize // 8


def read_stamps(words: "torch.Tensor") -> tuple[Array, Array]:
    """The sums uint64 [layers, 2, SUMS], modulo 2^64, and the pairs read over the bus, uint64 [layers].

    words: int64 [layers, WORDS] on the device. Waits for what is queued on PyTorch's current stream.
    """
    stamps = words.cpu().numpy().view(LAYER_STAMPS)[:, 0]
    return stamps["sums"], stamps["bus_pairs"]
