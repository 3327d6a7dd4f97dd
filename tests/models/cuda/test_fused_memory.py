"""What the host takes memory for while fused steps run ahead of it. Without a GPU."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from coldstream.kernels.fused.reference import FusedText
from coldstream.kernels.sample.settings import RowSettings
from coldstream.models.cuda.fused_draft import NUM_AHEAD, CudaFusedRun, CudaFusedSteps, FusedShape
from device_seams import model_device

MOST_NODES, BEFORE = 4, 250
SETTINGS = RowSettings(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 3, BEFORE + 1)


class RowMemory:
    """Rows that there is memory for, as a sequence's cache and a block's rows count them."""

    def __init__(self) -> None:
        self.length, self.rows, self.in_tables, self.num_known = BEFORE, 0, 0, 0

    def lengthen(self, *arguments: Any) -> bool:
        """Of a block's rows: how many; of a sequence's: it, how many, and how many of them are known."""
        num_rows, self.num_known = (arguments[0], 0) if len(arguments) == 1 else arguments[1:]
        before, self.rows = self.rows, max(self.rows, num_rows)
        return self.rows > before


class Device:
    """Keeps as many rows of each fused step as are asked for, in the order of launches."""

    def __init__(self, left: int) -> None:
        self.cache, self.block_rows = RowMemory(), RowMemory()
        self.held, self.left = 0, left
        self.accepts = 0
        self.results = np.zeros(2, np.int32)
        self.memory = SimpleNamespace(
            staged=SimpleNamespace(copy=lambda count: None),
            on_host=lambda: (None, SimpleNamespace(num_table_values=2)),
            results=SimpleNamespace(copy=lambda: self.results.copy()),
        )
        self.loaded = SimpleNamespace(sequences=self.cache, ops=SimpleNamespace(ngram_reader=None))
        self.block = SimpleNamespace(most_nodes=MOST_NODES)

    def launch(self, shape: FusedShape) -> None:
        assert self.cache.num_known <= self.held, "the device reads what was given back"
        most = min(shape.num_rows, self.left)
        for room in (self.cache, self.block_rows):
            assert room.in_tables >= self.held + most, "the device writes rows that it has no memory for"
        count = min(most, self.accepts)
        self.held, self.left = self.held + count, self.left - count
        self.results = np.array([count, 0, *[7] * count], np.int32)


@settings(max_examples=50)
@given(
    left=st.integers(2, 60),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, MOST_NODES), st.integers(0, 5)), max_size=40),
)
def test_every_fused_step_has_memory_for_all_rows_that_it_and_those_before_it_may_keep(
    left: int, events: list[tuple[bool, int, int]]
) -> None:
    device = Device(left)
    text = FusedText(MOST_NODES, 1, left, SETTINGS, frozenset())

    def write_tables(self: CudaFusedRun, host: Any) -> None:
        for room in (device.cache, device.block_rows):
            room.in_tables = room.rows

    with model_device(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaFusedRun, "_write_tables", write_tables)
        fused = CudaFusedRun(
            cast(CudaFusedSteps, device), cast(Any, device.cache), cast(Any, device.block_rows), text
        )
        for takes, num_nodes, accepts in events:
            if fused._in_flight and (takes or len(fused._in_flight) == NUM_AHEAD):
                fused.take()
            elif device.left:
                device.accepts = accepts
                fused.launch(num_nodes)
        while fused._in_flight:
            fused.take()
        assert fused._num_held == device.held
