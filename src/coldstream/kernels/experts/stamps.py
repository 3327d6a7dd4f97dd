"""When the parts of a layer begin and end: sums that kernels add to in the device's memory, one thread each.

Kept of steps whose router is a single launch (of up to eight rows) and shares pairs out. Nobody waits for
such an addition, and nothing comes to the host until somebody asks.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]

# Of a step: how many (1), and when, in nanoseconds of the device's clock.
SUMS = ("steps", "router_begins", "router_ends", "combine_begins", "answered", "combine_ends")

# `LayerStamps` of cuda/stamps.cuh.
LAYER_STAMPS = np.dtype(
    [
        ("router", np.uint64, 3),  # of the running step
        ("bus_pairs", np.uint64),
        ("sums", np.uint64, (2, len(SUMS))),  # of steps without and with pairs that came over the bus
    ]
)
WORDS = LAYER_STAMPS.itemsize // 8


def read_stamps(words: "torch.Tensor") -> tuple[Array, Array]:
    """The sums uint64 [layers, 2, SUMS], modulo 2^64, and the pairs that came over the bus, uint64 [layers].

    words: int64 [layers, WORDS] on the device. Waits for what is queued on PyTorch's current stream.
    """
    stamps = words.cpu().numpy().view(LAYER_STAMPS)[:, 0]
    return stamps["sums"], stamps["bus_pairs"]
