"""Planned device memory: the allocation itself needs no device."""

import gc

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldstream.kernels.cuda.memory import ALIGNMENT, Intervals, MemoryPlan


class IntervalsMachine(RuleBasedStateMachine):
    """In whatever order things come back: no two holders share a byte, and no byte is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.intervals = Intervals()
        self.held: dict[int, int] = {}
        self.peak = 0

    @rule(num_bytes=st.integers(1, 100))
    def take(self, num_bytes: int) -> None:
        start = self.intervals.take(num_bytes)
        assert all(start + num_bytes <= other or start >= other + size for other, size in self.held.items())
        self.held[start] = num_bytes

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.held)))
        self.intervals.give_back(start, self.held.pop(start))

    @invariant()
    def what_is_held_lies_inside(self) -> None:
        self.peak = max([self.peak, *(start + size for start, size in self.held.items())])
        assert self.intervals.size >= self.peak

    def teardown(self) -> None:
        for start, size in self.held.items():
            self.intervals.give_back(start, size)
        size = self.intervals.size
        if size:
            assert self.intervals.take(size) == 0
            assert self.intervals.size == size


TestIntervals = IntervalsMachine.TestCase


def test_workspace_comes_back_with_the_last_view() -> None:
    memory = MemoryPlan()
    first = memory.workspace((10, 100), torch.float32)
    size = memory.workspace_bytes
    view = first[2:].reshape(-1).view(torch.int32)
    del first
    gc.collect()
    memory.workspace((10, 100), torch.float32)
    assert memory.workspace_bytes == 2 * size
    del view
    held = memory.workspace((20, 100), torch.float32)
    assert memory.workspace_bytes == 2 * size
    assert held.shape == (20, 100)


def test_persistent_memory_stays() -> None:
    memory = MemoryPlan()
    for _ in range(3):
        memory.persistent((3,), torch.float16)
    assert memory.persistent_bytes == 3 * ALIGNMENT
    assert memory.workspace_bytes == 0
