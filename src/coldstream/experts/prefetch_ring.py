"""Prefetching: experts copied over the bus before their layer's router has run, from a guess at its choice.

The launch of a layer's router also applies the router of a later layer to the same input (`router/cuda.py`).
This guess names experts. Those without a slot are copied into a ring of places, on a fork of the step's
graph, while the layers between are computed. When the later layer's pairs are shared out, an expert in a
place is used like one in a slot. An expert whose copy has not ended is computed elsewhere, and its copy is
given up. So a step neither waits for a guess nor gets other bits because of it.

Each place has a key that names its expert. A layer's keys are cleared when the layer `distance` before it is
shared out. Copies that end set them. They stay valid until the layer's experts have been computed, because
its places are not filled again before that.
"""

from collections.abc import Sequence

from coldstream.experts.chosen_experts import AllocateZeros
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda.array import ALIGNMENT, DeviceArray
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.partition import ExpertPlaces, Prefetched, PrefetchNotes
from coldstream.kernels.experts.prefetch import (
    TALLIES,
    Target,
    expect_experts_cuda,
    prefetch_experts_cuda,
    target_of,
)
from coldstream.kernels.experts.table import ExpertTable


class PrefetchRing:
    """Places for prefetched experts of the next layers, and their keys.

    data: uint8 on the device, of which at most `prefetching.cap_bytes` are used. It is free for other uses
    between two steps. num_layers: at least those that may miss an expert. tallies: int32 [layers, TALLIES].
    """

    def __init__(
        self, prefetching: Prefetching, data: DeviceArray, zeros: AllocateZeros, num_layers: int
    ) -> None:
        self.distance, self.num_experts = prefetching.distance, prefetching.experts
        self.from_start = prefetching.from_start
        self._depth = prefetching.num_layers
        self._data = data[: prefetching.cap_bytes]
        self._place_bytes = len(self._data) // (self._depth * self.num_experts) // ALIGNMENT * ALIGNMENT
        self.num_bytes = self._depth * self.num_experts * self._place_bytes  # of `data`, from its begin
        self._keys = zeros((self._depth, self.num_experts), "int32")
        self._arrivals = zeros((self.num_experts,), "int32")
        self._reached = zeros((1,), "int32")
        self.tallies = zeros((num_layers, len(TALLIES)), "int32")

    def fetch(
        self, layer: int, guesses: DeviceArray, stacks: Sequence[ExpertTable], times: DeviceArray
    ) -> None:
        """Queues the copies of experts in guesses, int32 [rows, K], on a stream that has waited for them.

        stacks: gate, up and down of the layer, which the device reads over the bus. times: see `sharing_of`.
        The stream must have no other work at the same time.
        """
        prefetch_experts_cuda(self._target(layer, guesses, stacks, times))

    def expect(
        self,
        layer: int,
        guesses: DeviceArray,
        stacks: Sequence[ExpertTable],
        times: DeviceArray,
        mailbox: Mailbox,
    ) -> None:
        """Queues hints to the CPU at experts in guesses of several rows that `fetch` does not copy."""
        expect_experts_cuda(self._target(layer, guesses, stacks, times), times, mailbox)

    def _target(
        self, layer: int, guesses: DeviceArray, stacks: Sequence[ExpertTable], times: DeviceArray
    ) -> Target:
        places = self.prefetched(layer, stacks)
        return target_of(guesses, layer, stacks, places, self._reached, self._arrivals, self.tallies, times)

    def prefetched(self, layer: int, stacks: Sequence[ExpertTable]) -> Prefetched:
        """The places of `layer`. The first `distance` layers have none, as nothing guesses at them.

        ValueError if an expert is larger than a place.
        """
        if layer < self.distance:
            return Prefetched()
        keys, data = self._part(layer)
        return Prefetched(
            keys=keys.data_ptr(), room=ExpertPlaces.of(data, stacks, self.num_experts, self._place_bytes)
        )

    def notes(self, layer: int, *, is_guessing: bool) -> PrefetchNotes:
        """For the kernel that shares out `layer`. is_guessing: whether it also guesses at a later layer."""
        emptied = self._part(layer + self.distance)[0].data_ptr() if is_guessing else None
        return PrefetchNotes(
            emptied=emptied,
            count=self.num_experts,
            reached=self._reached.data_ptr(),
            tallies=self.tallies.data_ptr(),
        )

    def _part(self, layer: int) -> tuple[DeviceArray, DeviceArray]:
        """The keys and the places of a layer."""
        part, num_bytes = layer % self._depth, self.num_experts * self._place_bytes
        return self._keys[part], self._data[part * num_bytes : (part + 1) * num_bytes]
