"""The cache against a device whose copies are late, reordered, failing or reported twice, seed by seed."""

import numpy as np
import pytest
from fake_device import Caller

from coldstream.placement.policies import DecayedFrequency, Lfu, Lru, Policy
from random_residency import RandomResidency

LAYER_BYTES = [3, 5, 3, 3]
NUM_EXPERTS = 8
NUM_NUMBERS = len(LAYER_BYTES) * NUM_EXPERTS


class Simulation:
    """One run: every decision from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        policies: list[Policy] = [
            DecayedFrequency(),
            DecayedFrequency(2),
            Lru(),
            Lfu(),
            RandomResidency(seed),
        ]
        self.caller = Caller(
            LAYER_BYTES,
            NUM_EXPERTS,
            {3: int(self.rng.integers(0, 12)), 5: int(self.rng.integers(0, 6))},
            policies[self.rng.integers(len(policies))],
            profile=self.rng.random((len(LAYER_BYTES), NUM_EXPERTS)),
            max_bytes_per_step=(None, 0, 4, 9, 20)[self.rng.integers(5)],
        )
        self.device = self.caller.device
        self.likes = self.rng.normal(size=NUM_NUMBERS)

    def load(self) -> None:
        chosen: list[int] = []
        room = dict(self.caller.num_slots)
        for expert in self.rng.permutation(NUM_NUMBERS).tolist():
            size = self.device.expert_bytes[expert]
            if room[size]:
                room[size] -= 1
                chosen.append(expert)
        self.caller.load(chosen[: self.rng.integers(len(chosen) + 1)])

    def launch(self) -> None:
        if len(self.device.launched) <= self.rng.integers(1, 4):
            self.caller.launch()

    def used(self) -> list[int]:
        self.likes += self.rng.normal(size=NUM_NUMBERS) * 0.2
        order = np.argsort(self.likes + self.rng.gumbel(size=NUM_NUMBERS))
        return order[: self.rng.integers(0, NUM_NUMBERS // 2)].tolist()

    def finish(self) -> None:
        if self.device.launched:
            self.caller.finish(self.used(), trains=bool(self.rng.random() < 0.9))

    def read(self) -> None:
        for step in self.device.launched:
            self.device.read(step)

    def copied(self) -> None:
        if self.device.writing:
            copy = self.device.writing[self.rng.integers(len(self.device.writing))]
            self.caller.copied(copy, ok=bool(self.rng.random() < 0.8))

    def copied_again(self) -> None:
        if self.device.ended:
            copy = self.device.ended[self.rng.integers(len(self.device.ended))]
            self.caller.copied_again(copy, ok=bool(self.rng.integers(2)))

    def resize(self) -> None:
        self.caller.resize((3, 5)[self.rng.integers(2)], int(self.rng.integers(0, 14)))

    def run(self, num_events: int) -> None:
        self.load()
        events = {
            self.launch: 0.3,
            self.finish: 0.28,
            self.copied: 0.25,
            self.read: 0.08,
            self.copied_again: 0.06,
            self.resize: 0.03,
        }
        for index in self.rng.choice(len(events), size=num_events, p=list(events.values())):
            list(events)[index]()
            self.caller.check()
        self.caller.quiesce()


@pytest.mark.sharded(9)
@pytest.mark.parametrize("first_seed", range(0, 120, 10))
def test_ex04_no_step_ever_reads_another_experts_bytes(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        Simulation(seed).run(200)
