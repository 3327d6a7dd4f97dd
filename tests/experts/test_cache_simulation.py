"""The cache against a device whose copies are late, reordered, failing or reported twice, seed by seed."""

import numpy as np
import pytest
from fake_device import FakeDevice, check_slots

from coldstream.experts import ExpertCache
from coldstream.placement.policies import DecayedFrequency, Lfu, Lru, Policy, Random

LAYER_BYTES = [3, 5, 3, 3]
NUM_EXPERTS = 8
NUM_NUMBERS = len(LAYER_BYTES) * NUM_EXPERTS
PINNED = [0, 1, 8]


class Simulation:
    """One run: every decision from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        policies: list[Policy] = [DecayedFrequency(), DecayedFrequency(2), Lru(), Lfu(), Random(seed)]
        self.max_bytes = (None, 0, 4, 9, 20)[self.rng.integers(5)]
        self.sizes = {3: int(self.rng.integers(0, 12)), 5: int(self.rng.integers(0, 6))}
        copies_wait = bool(self.rng.integers(2))
        self.cache = ExpertCache(
            LAYER_BYTES,
            NUM_EXPERTS,
            self.sizes,
            policies[self.rng.integers(len(policies))],
            profile=self.rng.random((len(LAYER_BYTES), NUM_EXPERTS)),
            pinned=np.array(PINNED),
            max_bytes_per_step=self.max_bytes,
            copies_wait=copies_wait,
        )
        self.device = FakeDevice(LAYER_BYTES, NUM_EXPERTS, copies_wait)
        self.resized = False
        self.given_up: set[int] = set()
        self.failures: dict[int, int] = {}
        self.likes = self.rng.normal(size=NUM_NUMBERS)

    def load(self) -> None:
        chosen = []
        room = dict(self.sizes)
        for expert in [*PINNED, *self.rng.permutation(NUM_NUMBERS).tolist()]:
            if expert not in chosen and room[self.device.expert_bytes[expert]]:
                room[self.device.expert_bytes[expert]] -= 1
                chosen.append(expert)
        for copy in self.cache.load(chosen[: self.rng.integers(len(chosen) + 1)]):
            self.device.begin(copy)

    def launch(self) -> None:
        if len(self.device.launched) > self.rng.integers(1, 4):
            return
        before = self.device.bytes_in_flight
        start = self.cache.start_step()
        self.device.launch(start)
        started = sum(self.device.expert_bytes[copy.expert] for copy in start.copies)
        assert self.max_bytes is None or not started or before + started <= self.max_bytes
        assert not self.given_up & {copy.expert for copy in start.copies}
        assert self.resized or not set(PINNED) & set(start.withdrawn.tolist())

    def used(self) -> np.ndarray:
        self.likes += self.rng.normal(size=NUM_NUMBERS) * 0.2
        order = np.argsort(self.likes + self.rng.gumbel(size=NUM_NUMBERS))
        return order[: self.rng.integers(0, NUM_NUMBERS // 2)]

    def finish(self) -> None:
        if self.device.launched:
            step = min(self.device.launched)
            self.device.finish(step)
            self.cache.finish_step(step, self.used(), trains=bool(self.rng.random() < 0.9))

    def read(self) -> None:
        for step in self.device.launched:
            self.device.read(step)

    def copied(self) -> None:
        if not self.device.writing:
            return
        copy = self.device.writing[self.rng.integers(len(self.device.writing))]
        ok = bool(self.rng.random() < 0.8)
        self.device.end(copy, ok)
        kept_on = self.cache.copied(copy, ok)
        self.failures[copy.expert] = 0 if ok else self.failures.get(copy.expert, 0) + 1
        assert kept_on or self.failures[copy.expert] == 2
        if not kept_on:
            self.given_up.add(copy.expert)

    def stale(self) -> None:
        if self.device.ended:
            copy = self.device.ended[self.rng.integers(len(self.device.ended))]
            assert self.cache.copied(copy, bool(self.rng.integers(2)))

    def prefetch(self) -> None:
        predicted = self.rng.integers(0, NUM_NUMBERS, size=self.rng.integers(0, 12))
        self.cache.prefetch(predicted, int(self.rng.integers(-1, 5)))

    def resize(self) -> None:
        size = (3, 5)[self.rng.integers(2)]
        self.sizes[size] = int(self.rng.integers(0, 14))
        self.cache.resize(size, self.sizes[size])
        self.resized = True

    def run(self, num_events: int) -> None:
        self.load()
        events = {
            self.launch: 0.27,
            self.finish: 0.25,
            self.copied: 0.25,
            self.read: 0.08,
            self.stale: 0.06,
            self.prefetch: 0.06,
            self.resize: 0.03,
        }
        for index in self.rng.choice(len(events), size=num_events, p=list(events.values())):
            list(events)[index]()
            check_slots(self.cache, self.device)
        self.quiesce()

    def quiesce(self) -> None:
        """With all copies and steps ended, shrinking to nothing gives every slot back."""
        for size in (3, 5):
            self.cache.resize(size, 0)
        self.device.launch(self.cache.start_step())
        assert not self.device.table
        for step in sorted(self.device.launched):
            self.device.finish(step)
            self.cache.finish_step(step, np.empty(0, np.int64))
        assert not self.device.waiting
        for copy in list(self.device.writing):
            self.device.end(copy, True)
            self.cache.copied(copy)
        assert self.cache.reclaimed(3)
        assert self.cache.reclaimed(5)
        check_slots(self.cache, self.device)


@pytest.mark.parametrize("first_seed", range(0, 120, 10))
def test_no_step_ever_reads_another_experts_bytes(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        Simulation(seed).run(200)
