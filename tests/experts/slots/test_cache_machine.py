"""The cache under any order of events, small enough that a failure shrinks to a few lines."""

from fake_device import Caller
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coldstream.placement.policies import DecayedFrequency, Lfu, Lru, Policy, Static
from random_residency import RandomResidency

LAYER_BYTES = [3, 3, 5]
NUM_EXPERTS = 4
EXPERTS = st.integers(0, len(LAYER_BYTES) * NUM_EXPERTS - 1)
POLICIES = {
    "ours": DecayedFrequency,
    "ours, one copy": lambda: DecayedFrequency(1),
    "ours, eager": lambda: DecayedFrequency(hysteresis=1.0, payback=0.0),
    "lru": Lru,
    "lfu": Lfu,
    "random": lambda: RandomResidency(1),
    "static": Static,
}


class Residency(RuleBasedStateMachine):
    """A caller that may launch up to three steps ahead, and a device that takes its time."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        slots=st.tuples(st.integers(0, 6), st.integers(0, 3)),
        max_bytes=st.sampled_from((None, 0, 3, 8)),
        loaded=st.lists(EXPERTS, unique=True, max_size=6),
        readable=st.booleans(),
    )
    def begin(
        self,
        policy: str,
        slots: tuple[int, int],
        max_bytes: int | None,
        loaded: list[int],
        readable: bool,
    ) -> None:
        made: Policy = POLICIES[policy]()
        self.caller = Caller(
            LAYER_BYTES,
            NUM_EXPERTS,
            {3: slots[0], 5: slots[1]},
            made,
            max_bytes_per_step=max_bytes,
        )
        self.device = self.caller.device
        for size, num_slots in self.caller.num_slots.items():
            self.caller.load([each for each in loaded if self.device.expert_bytes[each] == size][:num_slots])
        if readable:
            self.caller.end_copies()
            self.caller.launch()
            self.caller.launch()

    @precondition(lambda self: len(self.device.launched) < 3)
    @rule()
    def start_step(self) -> None:
        self.caller.launch()

    @precondition(lambda self: self.device.launched)
    @rule(used=st.lists(EXPERTS, unique=True, max_size=8))
    def finish_step(self, used: list[int]) -> None:
        self.caller.finish(used)

    @precondition(lambda self: self.device.launched)
    @rule(used=st.lists(EXPERTS, unique=True, min_size=1, max_size=4))
    def next_step(self, used: list[int]) -> None:
        self.caller.finish(used)
        self.caller.launch()

    @precondition(lambda self: self.device.launched)
    @rule()
    def finish_prefill(self) -> None:
        self.caller.finish(range(len(self.device.expert_bytes)), trains=False)

    @precondition(lambda self: self.device.writing)
    @rule(data=st.data(), ok=st.booleans())
    def copied(self, data: st.DataObject, ok: bool) -> None:
        self.caller.copied(data.draw(st.sampled_from(self.device.writing)), ok)

    @precondition(lambda self: self.device.ended)
    @rule(data=st.data(), ok=st.booleans())
    def copied_again(self, data: st.DataObject, ok: bool) -> None:
        self.caller.copied_again(data.draw(st.sampled_from(self.device.ended)), ok)

    @rule(size=st.sampled_from((3, 5)), num_slots=st.integers(0, 7))
    def resize(self, size: int, num_slots: int) -> None:
        self.caller.resize(size, num_slots)

    @invariant()
    def slots_agree(self) -> None:
        self.caller.check()
        for step in self.device.launched:
            self.device.read(step)

    def teardown(self) -> None:
        """Once the device answers, all that was decided is done within a few steps."""
        if not hasattr(self, "caller"):
            return
        for _ in range(6):
            self.caller.launch()
            while self.device.launched:
                self.caller.finish(trains=False)
            self.caller.end_copies()
        if self.caller.max_bytes in (None, 8):
            assert not self.caller.cache._wanted
            assert not self.caller.launch().copies
        self.caller.quiesce()


TestResidency = Residency.TestCase
TestResidency.settings = settings(max_examples=300, stateful_step_count=40)
