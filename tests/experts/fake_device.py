"""Slots that hold patterns, and steps that read them: what a wrong decision of the cache would spoil.

A slot under a copy holds nobody's pattern. A launched step keeps its table, and may read all of it at any
moment until it ends.
"""

from coldstream.experts import Copy, ExpertCache, StepStart

TORN = -1

Place = tuple[int, int]  # size and slot


class FakeDevice:
    """What a caller of `ExpertCache` has: memory, a table, launched steps and copies in flight."""

    def __init__(self, layer_bytes: list[int], num_experts: int, copies_wait: bool = False) -> None:
        self.expert_bytes = [each for each in layer_bytes for _ in range(num_experts)]
        self.copies_wait = copies_wait
        self.memory: dict[Place, int] = {}  # whose pattern it holds
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
        for expert in start.withdrawn.tolist():
            del self.table[expert]
        for expert, slot in zip(start.arrived.tolist(), start.slots.tolist(), strict=True):
            assert expert not in self.table
            self.table[expert] = self.expert_bytes[expert], slot
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
        assert not readers or (self.copies_wait and copy.after_step == max(readers))
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
        """Lets those begin whose last reader has ended."""
        for copy in list(self.waiting):
            if copy.after_step is None or copy.after_step <= self.last_finished:
                self.waiting.remove(copy)
                self.writing.append(copy)
                self.memory[self.place(copy)] = TORN


def check_slots(cache: ExpertCache, device: FakeDevice) -> None:
    """Every slot is in one state, and the cache's views of it agree with each other and with the device."""
    holders = {}
    for size, pool in cache._pools.items():
        free = set(pool._free)
        assert len(free) == len(pool._free)
        for index, slot in enumerate(pool.slots):
            state = slot.state.value
            assert (index in free) == (state == "free" and index < pool.size)
            assert (index in pool._withdrawn) == (state == "withdrawn")
            expert = int(pool.owners[index])
            assert (expert < 0) == (state in ("free", "withdrawn"))
            writers = [copy for copy in device.in_flight if device.place(copy) == (size, index)]
            assert [(c.expert, c.generation) for c in writers] == (
                [(expert, slot.generation)] if state == "loading" else []
            )
            if expert >= 0:
                assert expert not in holders
                holders[expert] = index
        assert 0 <= cache._num_wanted(pool) <= pool.num_vacant
        busy = [device.place(copy) for copy in device.in_flight]
        busy += [place for table in device.launched.values() for place in table.values()]
        above = any(place[0] == size and place[1] >= pool.size for place in busy)
        assert not (above and cache.reclaimed(size))
    assert {e: i for e, i in enumerate(cache._slot.tolist()) if i >= 0} == holders
    assert len(set(cache._wanted)) == len(cache._wanted)
    assert not set(cache._wanted) & set(holders)
    absent = set(cache._absent.nonzero()[0].tolist())
    assert not absent & (set(holders) | set(cache._wanted))
    assert cache._bytes_in_flight == device.bytes_in_flight
