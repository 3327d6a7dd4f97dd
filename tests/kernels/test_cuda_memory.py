"""Planned device memory: the allocation itself needs no device."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldstream.kernels.cuda.array import ALIGNMENT, DeviceArray, as_type
from coldstream.kernels.cuda.memory import Intervals, MemoryPlan


class IntervalsMachine(RuleBasedStateMachine):
    """In any order of frees: no two owners share a byte, and no byte is lost."""

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
    first = memory.workspace((10, 100), "float32")
    size = memory.workspace_bytes
    view = as_type(first[2:].reshape(-1), "int32")
    del first
    memory.workspace((10, 100), "float32")
    assert memory.workspace_bytes == 2 * size
    del view
    held = memory.workspace((20, 100), "float32")
    assert memory.workspace_bytes == 2 * size
    assert held.shape == (20, 100)


def test_what_outlives_its_step_takes_nothing_of_the_next() -> None:
    memory = MemoryPlan()
    kept = []
    for _ in range(5):
        memory.start_step()
        first = memory.workspace((100,), "float32")
        kept.append(memory.workspace((1,), "float32"))  # lies between what comes back
        del first
        memory.workspace((200,), "float32")
    peak = memory.workspace_bytes
    memory.start_step()
    everything = memory.workspace((peak,), "uint8")
    kept.clear()  # gives nothing back of what the new step has
    other = memory.workspace((1,), "float32")
    assert memory.workspace_bytes == peak + ALIGNMENT, (everything.shape, other.shape)


def test_the_largest_step_is_planned_for() -> None:
    memory = MemoryPlan()
    for size, largest in ((3, 3), (5, 5), (2, 5)):
        memory.start_step()
        memory.workspace((size * ALIGNMENT,), "uint8")
        assert memory.workspace_bytes == largest * ALIGNMENT


def test_persistent_memory_stays() -> None:
    memory = MemoryPlan()
    for _ in range(3):
        memory.persistent((3,), "float16")
    assert memory.persistent_bytes == 3 * ALIGNMENT
    assert memory.workspace_bytes == 0


class Cycle:
    """Keeps an array until the garbage collector finds out."""

    def __init__(self, array: DeviceArray) -> None:
        self.array, self.itself = array, self


class Collecting(dict[int, int]):
    """A mapping whose iteration is interrupted by the garbage collector."""

    def items(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        for item in super().items():
            gc.collect(0)
            yield item


@pytest.fixture
def young_cycles() -> Iterator[None]:
    """No automatic collection makes a cycle older, so that `gc.collect(0)` finds each that the test makes."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("young_cycles")
def test_arrays_may_die_while_memory_is_searched() -> None:
    memory = MemoryPlan()
    memory._workspace._free = Collecting()
    for step in range(20):
        held = [memory.workspace((1 + 100 * (step + i) % 7,), "float32") for i in range(6)]
        Cycle(held.pop(step % 6))
        Cycle(held.pop(step % 5))
        del held[step % 4]
    held.clear()
    gc.collect(0)
    size = memory.workspace_bytes
    everything = memory.workspace((size,), "uint8")
    assert memory.workspace_bytes == size, everything.shape
