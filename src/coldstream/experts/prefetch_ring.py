"""Experts that come over the bus before their layer's router has run: what its router would choose now.

The router of a later layer is also applied to this layer's input, in the launch of this layer's own
(`router/cuda.py`). What it chooses and no slot holds is copied into a ring of places, on a branch of its own
of the step's graph, while the layers between are computed. Where the later layer's pairs are shared out, an
expert in a place is as good as one in a slot; one that is still on its way is computed elsewhere, and its
copy is given up. So no answer waits for a guess, or depends on one.

What lies where is said by keys, one for each place. Those of a layer's places are emptied where the layer
`distance` before it is shared out, and are only set after that, so that a key is true for as long as the step
asks for it: the places are not filled again before the layer's experts have been computed.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from coldstream.experts.prefetching import Prefetching
from coldstream.kernels.cuda.few_shapes import MAX_FEW_ROWS
from coldstream.kernels.cuda.memory import ALIGNMENT
from coldstream.kernels.experts.partition import Prefetched, PrefetchNotes
from coldstream.kernels.experts.prefetch import TALLIES, prefetch_experts_cuda
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.table import ExpertTable


class Zeros(Protocol):
    """Persistent memory, all zero."""

    def __call__(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor: ...


class PrefetchRing:
    """Places for the experts of the layers whose routers have yet to run, and who lies in them.

    data: uint8 on the device, which may serve for something else between two steps; of it at most
    `prefetching.cap_bytes` are shared out in places. num_layers: at least those that may miss an expert.
    `guesses` is int32 [layers, MAX_FEW_ROWS, K]; `tallies` int32 [layers, TALLIES].
    """

    def __init__(
        self, prefetching: Prefetching, data: torch.Tensor, zeros: Zeros, num_layers: int, num_ranks: int
    ) -> None:
        self.distance, self._count = prefetching.distance, prefetching.experts
        self._depth = prefetching.num_layers
        self._data = data[: prefetching.cap_bytes]
        self._place_bytes = len(self._data) // (self._depth * self._count) // ALIGNMENT * ALIGNMENT
        self._keys = zeros((self._depth, self._count), "int32")
        self._arrivals = zeros((self._count,), "int32")
        self._reached = zeros((1,), "int32")
        self.guesses = zeros((num_layers, MAX_FEW_ROWS, num_ranks), "int32")
        self.tallies = zeros((num_layers, len(TALLIES)), "int32")

    def fetch(self, layer: int, rows: int, stacks: Sequence[ExpertTable]) -> None:
        """Queues the copies for a step of `rows` rows, on a stream that has waited for the guesses.

        stacks: gate, up and down of the layer, which the device reads over the bus. Nothing else may be under
        way on the stream.
        """
        prefetch_experts_cuda(
            self.guesses[layer, :rows],
            layer,
            stacks,
            self.prefetched(layer, stacks),
            self._reached,
            self._arrivals,
            self.tallies,
        )

    def prefetched(self, layer: int, stacks: Sequence[ExpertTable]) -> Prefetched:
        """Where the experts of `layer` may lie: nowhere for the first, which nobody could guess.

        ValueError if one is larger than a place.
        """
        if layer < self.distance:
            return Prefetched()
        aligned = [-(-stack.matrix_bytes // ALIGNMENT) * ALIGNMENT for stack in stacks]
        if sum(aligned) > self._place_bytes:
            raise ValueError(f"an expert of {sum(aligned)} bytes for places of {self._place_bytes}")
        offsets = (ctypes.c_int64 * MATRICES)(*(sum(aligned[:i]) for i in range(MATRICES)))
        keys, data = self._part(layer)
        return Prefetched(keys.data_ptr(), data.data_ptr(), self._place_bytes, offsets, self._count)

    def notes(self, layer: int, *, is_guessing: bool) -> PrefetchNotes:
        """What the sharing out of `layer` does; is_guessing: whether it guesses at a later layer."""
        emptied = self._part(layer + self.distance)[0].data_ptr() if is_guessing else None
        return PrefetchNotes(emptied, self._count, self._reached.data_ptr(), self.tallies.data_ptr())

    def _part(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the places of a layer."""
        part, num_bytes = layer % self._depth, self._count * self._place_bytes
        return self._keys[part], self._data[part * num_bytes : (part + 1) * num_bytes]
