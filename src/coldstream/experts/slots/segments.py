"""The memory of slots, in segments that can be freed and allocated again while the others stay in place."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray

Array = np.ndarray[Any, Any]

SEGMENT_BYTES = 256 * 2**20
GRANULE_BYTES = 2 * 2**20  # the driver's unit of allocation


def segment_slots(num_slots: int, slot_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> list[int]:
    """How many slots each segment holds. Pure.

    Segments hold as many as fit into `segment_bytes`, or down to half as many where that wastes less of the
    driver's granules, and at least one. The first segment has the remainder; it is freed last.
    """
    most = max(1, segment_bytes // slot_bytes)
    candidates = range(most, most // 2, -1)
    each = min(candidates, key=lambda count: -count * slot_bytes % GRANULE_BYTES / count)
    whole, rest = divmod(num_slots, each)
    return [rest] * (rest > 0) + [each] * whole


class SlotSegments:
    """Slots by the bytes of an expert, numbered from 0 in each size; the last segments are freed first.

    num_slots: by size. allocate: returns uint8 [bytes] on the device. Its exceptions are passed on, with
    nothing left allocated.
    """

    def __init__(
        self,
        num_slots: Mapping[int, int],
        allocate: Callable[[int], DeviceArray],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._allocate = allocate
        self._segments = {
            size: [allocate(slots * size) for slots in segment_slots(count, size, segment_bytes)]
            for size, count in num_slots.items()
        }
        self._dropped: list[tuple[int, int]] = []  # (slot size, bytes), the last freed last

    @property
    def num_slots(self) -> dict[int, int]:
        """By size."""
        return {
            size: sum(segment.numel() for segment in segments) // size
            for size, segments in self._segments.items()
        }

    def addresses(self, size: int) -> Array:
        """Addresses of the slots of a size: int64 [slots]."""
        first = [
            segment.data_ptr() + size * np.arange(segment.numel() // size, dtype=np.int64)
            for segment in self._segments[size]
        ]
        return np.concatenate([np.empty(0, np.int64), *first])

    @property
    def largest(self) -> int | None:
        """The size whose slots have most of the memory; None if there are none left."""
        taken = {
            size: sum(segment.numel() for segment in segments) for size, segments in self._segments.items()
        }
        return max((size for size in taken if taken[size]), key=lambda size: taken[size], default=None)

    def without_last(self, size: int) -> int:
        """How many slots of a size remain without its last segment."""
        return self.num_slots[size] - self._segments[size][-1].numel() // size

    def drop_last(self, size: int) -> int:
        """Frees the last segment of a size, which must not be in use. Returns its bytes."""
        num_bytes = self._segments[size].pop().numel()
        self._dropped.append((size, num_bytes))
        return num_bytes

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the segment that was freed last; 0 if none is missing."""
        return self._dropped[-1][1] if self._dropped else 0

    def restore_last(self) -> int:
        """Allocates the segment that was freed last again, perhaps elsewhere. Returns the size of its slots.

        There must be one. Exceptions of `allocate` are passed on, with nothing changed.
        """
        size, num_bytes = self._dropped[-1]
        self._segments[size].append(self._allocate(num_bytes))
        self._dropped.pop()
        return size
