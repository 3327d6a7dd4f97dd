"""Slots with patterns, and steps that read them, to detect wrong decisions of the cache.

A slot holds no expert's pattern during a copy. A launched step keeps its table, and may read all of it until
it ends.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from coldstream.experts import Copy, ExpertCache, StepStart
from coldstream.placement.policies import Policy

TORN = -1
NOTHING = np.empty(0, np.int64)

Place = tuple[int, int]  # size and slot


class FakeDevice:
    """Memory, a table, launched steps and copies in flight."""

    def __init__(self, expert_bytes: list[int]) -> None:
        self.expert_bytes = expert_bytes
        self.memory: dict[Place, int] = {}  # the expert whose pattern it holds
        self.table: dict[int, Place] = {}  # by expert
        self.launched: dict[int, dict[int, Place]] = {}  # table by step
        self.waiting: list[Copy] = []  # for the slot's last reader
        self.writing: list[Copy] = []
        self.ended: list[Copy] = []
        self.last_finished = -1

    @property
    def in_flight(self) -> list[Copy]:
        return self.waiting + self.writing

    @property
    def bytes_in_flight(self) -> int:
        return sum(self.expert_bytes[copy.expert] for copy in self.in_flight)

    def place(self, copy: Copy) -> Place:
        return self.expert_bytes[copy.expert], copy.slot

    def launch(self, start: StepStart) -> None:
        """Changes the table, begins the copies, and lets the step read."""
        changed = [self.table.pop(expert) for expert in start.withdrawn.tolist()]
        for expert, slot in zip(start.arrived.tolist(), start.slots.tolist(), strict=True):
            assert expert not in self.table
            self.table[expert] = self.expert_bytes[expert], slot
            changed.append(self.table[expert])
        assert len(set(changed)) == len(changed), "the entries of a slot change once where a step starts"
        assert len(set(self.table.values())) == len(self.table), "a slot has one owner"
        for copy in start.copies:
            self.begin(copy)
        self.launched[start.step] = dict(self.table)
        assert not set(self.table.values()) & set(map(self.place, self.in_flight))

    def begin(self, copy: Copy) -> None:
        place = self.place(copy)
        assert place not in map(self.place, self.in_flight), "a slot has one writer"
        assert copy.expert not in [other.expert for other in self.in_flight], "an expert is copied once"
        readers = [step for step, table in self.launched.items() if place in table.values()]
        assert not readers or copy.after_step == max(readers)
        for other in self.ended:
            assert self.place(other) != place or other.generation < copy.generation
        self.waiting.append(copy)
        self._write()

    def end(self, copy: Copy, ok: bool) -> None:
        self.writing.remove(copy)
        self.ended.append(copy)
        if ok:
            self.memory[self.place(copy)] = copy.expert

    def read(self, step: int) -> None:
        """A step reads all it may: each slot has to hold its own expert's pattern."""
        for expert, place in self.launched[step].items():
            assert self.memory[place] == expert

    def finish(self, step: int) -> None:
        self.read(step)
        del self.launched[step]
        self.last_finished = step
        self._write()

    def _write(self) -> None:
        """Begins copies whose slot's last reader has ended."""
        for copy in list(self.waiting):
            if copy.after_step is None or copy.after_step <= self.last_finished:
                self.waiting.remove(copy)
                self.writing.append(copy)
                self.memory[self.place(copy)] = TORN


class Caller:
    """A cache and a device, and the invariants of the cache's answers."""

    def __init__(
        self,
        layer_bytes: Sequence[int],
        num_experts: int,
        num_slots: dict[int, int],
        policy: Policy,
        *,
        profile: np.ndarray | None = None,
        max_bytes_per_step: int | None = None,
    ) -> None:
        self.cache = ExpertCache(
            layer_bytes,
            num_experts,
            num_slots,
            policy,
            profile=profile,
            max_bytes_per_step=max_bytes_per_step,
        )
        self.device = FakeDevice([each for each in layer_bytes for _ in range(num_experts)])
        self.num_slots = {each: num_slots.get(each, 0) for each in layer_bytes}
        self.max_bytes = max_bytes_per_step
        self.failures: dict[int, int] = {}
        self.given_up: set[int] = set()
        self.hits = 0

    @property
    def readable(self) -> set[int]:
        """Experts that the step launched last may read."""
        return set(self.device.table)

    def load(self, experts: Iterable[int]) -> None:
        for copy in self.cache.load(experts):
            assert copy.after_step is None
            self.device.begin(copy)

    def launch(self) -> StepStart:
        before = self.device.bytes_in_flight
        start = self.cache.start_step()
        self.device.launch(start)
        begun = sum(self.device.expert_bytes[copy.expert] for copy in start.copies)
        assert self.max_bytes is None or not begun or before + begun <= self.max_bytes
        assert not self.given_up & {copy.expert for copy in start.copies}
        for size, slot in self.device.table.values():
            assert slot < self.num_slots[size]
        return start

    def finish(self, used: Iterable[int] = (), trains: bool = True) -> None:
        """Ends the oldest launched step."""
        step = min(self.device.launched)
        experts = np.fromiter(used, np.int64)
        if trains:
            self.hits += len(set(experts.tolist()) & set(self.device.launched[step]))
        self.device.finish(step)
        self.cache.finish_step(step, experts, trains=trains)
        assert self.cache.counters.hits.sum() == self.hits, "counted against the step's own table"

    def copied(self, copy: Copy, ok: bool = True) -> bool:
        self.device.end(copy, ok)
        goes_on = self._said(copy, ok)
        self.failures[copy.expert] = 0 if ok else self.failures.get(copy.expert, 0) + 1
        assert goes_on == (self.failures[copy.expert] < 2)
        if not goes_on:
            self.given_up.add(copy.expert)
        return goes_on

    def copied_again(self, copy: Copy, ok: bool) -> None:
        """Reports a copy that had ended once more."""
        assert self._said(copy, ok)

    def _said(self, copy: Copy, ok: bool) -> bool:
        """Whether the copy is done, or begun again."""
        if not ok:
            return self.cache.failed(copy)
        self.cache.copied([copy])
        return True

    def resize(self, size: int, num_slots: int) -> None:
        self.cache.resize(size, num_slots)
        self.num_slots[size] = num_slots

    def end_copies(self) -> None:
        for copy in list(self.device.writing):
            self.copied(copy)

    def step(self, used: Iterable[int], trains: bool = True) -> StepStart:
        """A step that ends before the next is launched, with its copies."""
        start = self.launch()
        self.end_copies()
        self.finish(used, trains)
        return start

    def quiesce(self) -> None:
        """With all copies and steps ended, shrinking to nothing gives every slot back."""
        for size in self.num_slots:
            self.resize(size, 0)
        assert not self.launch().copies
        assert not self.readable
        while self.device.launched:
            self.finish()
        assert not self.device.waiting
        self.end_copies()
        self.check()
        assert all(map(self.cache.reclaimed, self.num_slots))

    def check(self) -> None:
        """Checks that all records of every slot agree."""
        cache, device = self.cache, self.device
        busy = [device.place(copy) for copy in device.in_flight]
        busy += [place for table in device.launched.values() for place in table.values()]
        holders = {}
        for size, pool in cache._pools.items():
            free = set(pool._free)
            assert len(free) == len(pool._free)
            for index, slot in enumerate(pool.slots):
                state, expert = slot.state.value, slot.owner
                assert (index in free) == (state == "free" and index < pool.size)
                assert (expert < 0) == (state == "free")
                writers = [copy for copy in device.in_flight if device.place(copy) == (size, index)]
                assert [(copy.expert, copy.generation) for copy in writers] == (
                    [(expert, slot.generation)] if state == "loading" else []
                )
                if expert >= 0:
                    assert expert not in holders
                    holders[expert] = index
            assert 0 <= cache._num_wanted(pool) <= pool.num_free
            if cache.reclaimed(size):
                assert not [place for place in busy if place[0] == size and place[1] >= pool.size]
        assert {expert: slot for expert, slot in enumerate(cache._slot.tolist()) if slot >= 0} == holders
        wanted = set(cache._wanted)
        assert len(wanted) == len(cache._wanted)
        absent = set(np.flatnonzero(cache._absent).tolist())
        every = sorted([*wanted, *absent, *holders, *self.given_up])
        assert every == list(range(cache._absent.size)), "in one of these, and in no two"
        assert cache._bytes_in_flight == device.bytes_in_flight
