"""Which rows of a batch belong together."""

from collections.abc import Iterator

import torch

from coldstream.kernels.ops import Rows


def sequences(rows: Rows) -> Iterator[tuple[int, slice]]:
    """The cache slot and the rows of each sequence in a batch, in order; nothing for an empty batch."""
    slots, counts = torch.unique_consecutive(rows.slots, return_counts=True)
    start = 0
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        yield slot, slice(start, start + count)
        start += count
