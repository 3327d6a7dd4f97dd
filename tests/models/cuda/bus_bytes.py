"""Measures the bytes read over the bus in decode steps, on a GPU on the host, without its counters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from coldstream.experts.decode import DecodeExperts
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.experts.partition import Partition
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertWeights, Routing
from coldstream.models.cuda.graphs import CapturedSteps
from device_arrays import view_of

POISON = 0xA5


class BusBytes:
    """By layer, int64 [layers]: bytes of experts that pairs read over the bus, and of those copied ahead.

    tardy: every so many launches of copies find that their layer has been shared out; 0: none.
    """

    def __init__(self, num_layers: int, tardy: int = 0) -> None:
        self.read, self.copied = (np.zeros(num_layers, np.int64) for _ in range(2))
        self.num_copies = np.zeros(num_layers, np.int64)
        self._tardy, self._num_fetches = tardy, 0

    @contextmanager
    def noted(self) -> Iterator["BusBytes"]:
        """Inside, of all steps. They run without graphs, as a graph's launches pass here only once."""
        compute, fetch = DecodeExperts.compute, PrefetchRing.fetch

        def computed(decode: DecodeExperts, x: Any, routing: Routing, weights: ExpertWeights) -> Any:
            self._note_reads(decode, decode._tables.number_of(weights), routing)
            return compute(decode, x, routing, weights)

        def fetched(
            ring: PrefetchRing, layer: int, rows: int, stacks: Sequence[ExpertTable], times: DeviceArray
        ) -> None:
            self._num_fetches += 1
            if self._tardy and self._num_fetches % self._tardy == 0:
                view_of(ring._reached).fill(layer + 1)
            self._note_copies(ring, layer, stacks, lambda: fetch(ring, layer, rows, stacks, times))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DecodeExperts, "compute", computed)
            patch.setattr(PrefetchRing, "fetch", fetched)
            patch.setattr(CapturedSteps, "run", lambda self, key, step, *others: step())
            yield self

    def _note_reads(self, decode: DecodeExperts, layer: int, routing: Routing) -> None:
        """Each expert once, however many pairs it has: by the CPU, or by the GPU where it is mapped or in a
        place of its own.
        """
        places: Partition = routing.places
        by_cpu = np.unique(view_of(places.cpu_ids))
        num_by_cpu = int((by_cpu >= 0).sum())
        staging = decode._staging.data_ptr(), decode._staging.data_ptr() + decode._staging.numel()
        used = view_of(places.addresses)[:, np.unique(view_of(routing.ids))]
        for stack, addresses in zip(decode._tables.layers[layer], used, strict=True):
            mapped = stack.mapped, stack.mapped + len(stack.addresses) * stack.step
            first, end = staging if len(routing.ids) > 1 else mapped
            read = {address for address in addresses.tolist() if first <= address < end}
            self.read[layer] += (len(read) + num_by_cpu) * stack.matrix_bytes

    def _note_copies(self, ring: PrefetchRing, layer: int, stacks: Sequence[ExpertTable], fetch: Any) -> None:
        """Only places of the layer change, and in them whole experts."""
        places, data, whole = ring.prefetched(layer, stacks), ring._part(layer)[1], ring._data
        view_of(data).fill(POISON)
        others = view_of(whole).copy()
        fetch()
        copied = (view_of(data).reshape(places.room.count, -1) != POISON).any(axis=1)
        expert_bytes = sum(stack.matrix_bytes for stack in stacks)
        self.num_copies[layer] += int(copied.sum())
        self.copied[layer] += int(copied.sum()) * expert_bytes
        first = data.data_ptr() - whole.data_ptr()
        others[first : first + len(data)] = view_of(data)
        assert np.array_equal(others, view_of(whole)), "places of other layers stay as they are"
