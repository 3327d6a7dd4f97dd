"""Sums of the times at which the parts of a layer begin and end, which kernels add up in device memory.

Only for steps whose router is a single launch (up to eight rows) and shares pairs out. One thread of a kernel
adds without waiting for the result; the host copies the sums only in `read_stamps`.
"""

import ctypes
from typing import Any

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.structs import declared_in

Array = np.ndarray[Any, Any]

# What a step adds: 1, then times in nanoseconds of the device's clock.
SUMS = ("steps", "router_begins", "router_ends", "combine_begins", "answered", "combine_ends")


@declared_in("cuda/stamps.cuh")
class LayerStamps(ctypes.Structure):
    """The running step's times, and sums over all steps without and with pairs read over the bus."""


LAYER_STAMPS = np.dtype(LayerStamps)
WORDS = LAYER_STAMPS.itemsize // 8


def read_stamps(words: "DeviceArray") -> tuple[Array, Array]:
    """The sums uint64 [layers, 2, SUMS], modulo 2^64, and the pairs read over the bus, uint64 [layers].

    words: int64 [layers, WORDS] on the device. Waits for what is queued on the current stream.
    """
    from coldstream.kernels.cuda.contents import read  # statistics name what is here without a GPU's packages

    return parse_stamps(read(words))


def parse_stamps(words: Array) -> tuple[Array, Array]:
    """`read_stamps` of a copy on the host, int64 [layers, WORDS], in views of it."""
    stamps = words.view(LAYER_STAMPS)[:, 0]
    return stamps["sums"], stamps["bus_pairs"]
