"""Kept prefixes under any order of calls, against lists of all that is kept; what goes first; pins."""

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from prefix_memory import KINDS, Memory

from coldstream.errors import InvalidRequestError
from coldstream.kvcache import CacheSize, Pin, PrefixCache, Sequence

NAMESPACES = st.sampled_from(("", "other key"))
PARTS = st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 20, 100, 255, 256, 257, 400)))
PROMPTS = st.lists(PARTS, min_size=1, max_size=4).map(
    lambda parts: [token for token, count in parts for _ in range(count)]
)


def num_common(first: list[int], second: list[int]) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


class Prefixes(RuleBasedStateMachine):
    """Sequences hold what they say at every moment, and the memory of all of them is accounted for."""

    @initialize(
        max_states=st.integers(0, 5),
        num_blocks=st.integers(4, 16),
        num_states=st.integers(1, 7),
        kind=st.sampled_from(KINDS),
    )
    def open(self, max_states: int, num_blocks: int, num_states: int, kind: str) -> None:
        self.memory = Memory(num_blocks, num_states, kind)
        self.kind, self.truncates_anywhere = kind, kind == "none"
        self.cache = PrefixCache(self.memory, max_states=max_states)
        self.max_states = max_states
        self.live: list[tuple[str, list[int], Sequence]] = []
        self.pins: list[tuple[str, list[int], Pin]] = []

    def kept(self, namespace: str) -> list[list[int]]:
        nodes = self.cache._tree.nodes()
        return [
            node.token_ids.tolist()
            for node in nodes
            if node.entry is not None and node.entry.namespace == namespace
        ]

    def extend(self, sequence: Sequence, ids: list[int]) -> bool:
        need = self.memory.need(sequence, len(ids) - sequence.length)
        free = self.memory.free
        if not self.cache.make_room(need):
            assert self.memory.free == free
            return False
        self.memory.extend(sequence, ids)
        return True

    @rule(namespace=NAMESPACES, ids=PROMPTS, boundaries=st.lists(st.integers(0, 1600), max_size=4))
    def prompt(self, namespace: str, ids: list[int], boundaries: list[int]) -> None:
        kept = self.kept(namespace)
        known = [node.token_ids.tolist() for node in self.cache._tree.nodes() if self.is_of(node, namespace)]
        held = [each for each in kept if len(each) < len(ids) and ids[: len(each)] == each]
        matched = max([num_common(each, ids) for each in known], default=0)
        before = self.cache.statistics()
        prefix = self.cache.begin(ids, boundaries, namespace)
        after = self.cache.statistics()
        lengths = [len(each) for each in held]
        most = max([min(num_common(each, ids), len(ids) - 1) for each in kept], default=0)
        if self.truncates_anywhere:
            lengths.append(most)
        assert prefix.length == prefix.sequence.length >= max(lengths, default=0)
        # The end of a longer prefix may reach back as far as the prompt goes with it.
        assert prefix.length == max(lengths, default=0) or (self.kind == "windows" and prefix.length == most)
        assert after.reused_tokens - before.reused_tokens == prefix.length
        assert after.repeated_tokens - before.repeated_tokens == min(matched, len(ids) - 1) - prefix.length
        assert all(prefix.length < checkpoint < len(ids) for checkpoint in prefix.checkpoints)
        self.memory.check(prefix.sequence, ids)
        for end in (*prefix.checkpoints, len(ids)):
            if not self.extend(prefix.sequence, ids[:end]):
                self.memory.release(prefix.sequence)
                return
            if end < len(ids):
                self.cache.keep(ids, prefix.sequence, namespace)
        self.live.append((namespace, ids, prefix.sequence))

    def is_of(self, node: object, namespace: str) -> bool:
        root = list(node.path)[-1]  # type: ignore[attr-defined]
        return self.cache._tree._roots.get(namespace) is root

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=PROMPTS)
    def answer(self, data: st.DataObject, more: list[int]) -> None:
        place = data.draw(st.integers(0, len(self.live) - 1))
        namespace, ids, sequence = self.live[place]
        if self.extend(sequence, ids + more):
            self.live[place] = (namespace, ids + more, sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        namespace, ids, sequence = data.draw(st.sampled_from(self.live))
        pinned = {id(pin._kept) for _, _, pin in self.pins}
        self.cache.keep(ids, sequence, namespace)
        is_full = len(pinned) >= self.max_states
        kept = [each[: len(ids)] if self.truncates_anywhere else each for each in self.kept(namespace)]
        assert ids in kept or is_full

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.floats(0, 1))
    def forget(self, data: st.DataObject, share: float) -> None:
        namespace, ids, _ = data.draw(st.sampled_from(self.live))
        ids = ids[: 1 + int(share * (len(ids) - 1))]
        self.cache.forget(ids, namespace)
        pinned = [each for owner, each, _ in self.pins if owner == namespace]
        left = [each for each in self.kept(namespace) if each not in pinned]
        assert ids not in left
        assert not self.truncates_anywhere or not any(each[: len(ids)] == ids for each in left)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.live) - 1))
        self.memory.release(self.live.pop(place)[2])

    @rule(num_blocks=st.integers(0, 17), num_states=st.integers(0, 8))
    def make_room(self, num_blocks: int, num_states: int) -> None:
        pinned = {id(pin._kept) for _, _, pin in self.pins}
        loose = [each.sequence for each in self.cache._kept if id(each) not in pinned]
        free, loose_size, count = self.memory.free, self.memory.freed_by(loose), len(self.cache._kept)
        is_possible = (
            free.num_blocks + loose_size.num_blocks >= num_blocks
            and free.num_states + loose_size.num_states >= num_states
        )
        assert self.cache.make_room(CacheSize(num_blocks, num_states)) == is_possible
        if is_possible:
            assert self.memory.free.num_blocks >= num_blocks
            assert self.memory.free.num_states >= num_states
        else:
            assert self.memory.free == free
            assert len(self.cache._kept) == count

    @rule(namespace=NAMESPACES, ids=PROMPTS)
    def pin(self, namespace: str, ids: list[int]) -> None:
        held = [each for each in self.kept(namespace) if ids[: len(each)] == each]
        pin = self.cache.pin(ids, namespace)
        assert (pin.length if pin else 0) == max(map(len, held), default=0)
        if pin:
            self.pins.append((namespace, ids[: pin.length], pin))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))[2]
        self.cache.unpin(pin)
        self.cache.unpin(pin)

    @rule(namespace=st.none() | NAMESPACES)
    def clear(self, namespace: str | None) -> None:
        self.cache.clear(namespace)
        gone = [pin for pin in self.pins if namespace in (None, pin[0])]
        self.pins = [pin for pin in self.pins if pin not in gone]
        for _, _, pin in gone:
            self.cache.unpin(pin)
        assert not self.kept(namespace or "")

    @invariant()
    def is_whole(self) -> None:
        self.cache.check_integrity()
        for kept in self.cache._kept:
            self.memory.check(kept.sequence, kept.node.token_ids)
        for _, ids, sequence in self.live:
            self.memory.check(sequence, ids)
        for namespace, ids, _ in self.pins:
            assert ids in self.kept(namespace), "a pinned prefix was let go"
        assert self.cache.statistics().pinned == len({id(pin._kept) for _, _, pin in self.pins})

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for _, _, sequence in self.live:
                self.memory.release(sequence)
            self.cache.clear()
            assert self.memory.free == self.memory.cache.free
            size = self.memory.free
            assert size.num_blocks == self.memory.cache.blocks.num_blocks
            assert size.num_states == self.memory.cache.states.num_blocks


TestCA04PrefixesUnderAnyOrderOfCalls = Prefixes.TestCase
TestCA04PrefixesUnderAnyOrderOfCalls.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)


def computed(cache: PrefixCache, memory: Memory, ids: list[int], namespace: str = "") -> int:
    """Computes a prompt as the engine does. Returns how many tokens were held."""
    prefix = cache.begin(ids, (), namespace)
    for checkpoint in prefix.checkpoints:
        memory.extend(prefix.sequence, ids[:checkpoint])
        cache.keep(ids, prefix.sequence, namespace)
    memory.extend(prefix.sequence, ids)
    memory.release(prefix.sequence)
    return prefix.length


def text(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


@pytest.fixture
def memory() -> Memory:
    return Memory(num_blocks=60, num_states=20)


def test_a_prompt_hits_the_second_time_it_is_seen(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=8)
    assert [computed(cache, memory, text(0, 700)) for _ in range(2)] == [0, 699]


def test_where_two_prompts_part_a_state_is_kept_for_the_third(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=8)
    header = text(0, 900)
    lengths = [computed(cache, memory, header + text(start, 300)) for start in (1000, 2000, 3000)]
    assert lengths == [0, 0, 900]


def test_a_partial_hit_replays_at_most_2048_tokens(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=12)
    computed(cache, memory, text(0, 7000))
    for parting in (6999, 6200, 4100, 3000, 2100):
        held = computed(cache, memory, text(0, parting) + text(9000, 100))
        assert parting - held <= 2048
        cache.check_integrity()


def test_a_prompt_shorter_than_what_is_kept_or_as_long_begins_earlier(memory: Memory) -> None:
    """CA05: a recurrent state is of one length and is never truncated."""
    cache = PrefixCache(memory, max_states=8)
    ids = text(0, 600)
    sequence = memory.new_sequence()
    memory.extend(sequence, ids)
    cache.keep(ids, sequence)
    assert cache.begin(ids[:300]).length == 0
    assert cache.begin(ids).length == 0
    assert cache.begin([*ids, 5]).length == 600


def test_pc01_a_prefix_is_not_found_under_another_key(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=8)
    ids = text(0, 700)
    computed(cache, memory, ids, "key of one")
    prefix = cache.begin(ids, (), "key of another")
    assert prefix.length == 0
    # Nor is it known to have passed, which the checkpoints would tell.
    assert prefix.checkpoints == PrefixCache(memory, max_states=8).begin(ids).checkpoints
    assert computed(cache, memory, ids, "key of one") == 699


def test_ca02_of_prompts_in_the_same_step_none_reads_what_is_not_computed(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=8)
    ids = text(0, 700)
    prefixes = [cache.begin(ids) for _ in range(3)]
    assert [prefix.length for prefix in prefixes] == [0, 0, 0]
    for prefix in prefixes:
        memory.extend(prefix.sequence, ids[: prefix.checkpoints[-1]])
        cache.keep(ids, prefix.sequence)
        cache.check_integrity()
    assert cache.statistics().kept == 1
    assert cache.begin(ids).length == prefixes[0].checkpoints[-1]


def test_ca03_a_prompt_that_is_given_up_leaves_nothing_but_its_passing(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=8)
    prefix = cache.begin(text(0, 700))
    memory.extend(prefix.sequence, text(0, 300))
    memory.release(prefix.sequence)
    assert cache.statistics().kept == 0
    assert cache.begin(text(0, 700)).length == 0
    assert memory.free == CacheSize(60, 20)


def test_ca04_if_all_is_pinned_nothing_goes_and_nothing_more_is_kept(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=2)
    pins = []
    for start in (0, 1000):
        ids = text(start, 300)
        computed(cache, memory, ids)
        pin = cache.pin(ids)
        assert pin is not None
        pins.append(pin)
    computed(cache, memory, text(2000, 300))
    statistics = cache.statistics()
    assert (statistics.kept, statistics.pinned, statistics.refused) == (2, 2, 1)
    free = memory.free
    assert not cache.make_room(CacheSize(60, 1))
    assert memory.free == free
    cache.unpin(pins[0])
    assert computed(cache, memory, text(2000, 300)) == 0
    assert computed(cache, memory, text(1000, 300)) == 299
    cache.clear()
    assert memory.free == CacheSize(60, 20)


@pytest.mark.sharded(of="models on the CPU")
def test_ca04_five_thousand_prompts_leave_no_reference_behind(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=3)
    for number in range(5_000):
        ids = [number % 7, number % 11, *([number % 3] * 20)]
        computed(cache, memory, ids, str(number % 2))
    cache.check_integrity()
    cache.clear()
    assert memory.free == CacheSize(60, 20)


@pytest.mark.parametrize("max_states", [0, 1])
def test_a_cache_of_no_or_one_state_works(memory: Memory, max_states: int) -> None:
    cache = PrefixCache(memory, max_states=max_states)
    lengths = [computed(cache, memory, text(0, 3000)) for _ in range(2)]
    assert lengths == [0, 2999 * max_states]
    cache.check_integrity()


def test_what_costs_least_to_compute_again_goes_first(memory: Memory) -> None:
    """Of three prompts a short one goes first, though it came last; a system prompt in use stays."""
    cache = PrefixCache(memory, max_states=8)
    for start, count in ((0, 2000), (5000, 600), (8000, 250)):
        computed(cache, memory, text(start, count))
    free = memory.free
    assert cache.make_room(CacheSize(free.num_blocks + 1, 0))
    lengths = [
        cache.begin(text(start, count)).length for start, count in ((0, 2000), (5000, 600), (8000, 250))
    ]
    assert lengths == [1999, 599, 0]


def test_a_prefix_in_frequent_use_outlives_longer_ones(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=4)
    for _ in range(20):
        computed(cache, memory, text(0, 300))
    for start in range(1000, 9000, 1000):
        computed(cache, memory, text(start, 900))
    assert cache.begin(text(0, 300)).length == 299


def test_a_prefix_that_was_in_use_long_ago_goes(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=4)
    for _ in range(20):
        computed(cache, memory, text(0, 300))
    for number in range(1000):
        computed(cache, memory, text(1000 + number, 300))
    assert cache.begin(text(0, 300)).length == 0


def test_memory_of_a_prefix_in_use_is_not_counted_on(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=4)
    computed(cache, memory, text(0, 2561))
    running = cache.begin(text(0, 2561)).sequence
    assert not cache.make_room(CacheSize(60, 0))
    assert cache.begin(text(0, 2561)).length == 2560
    memory.check(running, text(0, 2561))


def test_prompts_remembered_are_bounded_and_those_used_longest_ago_are_forgotten(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldstream.kvcache.prefix.cache.MAX_PASSED", 3)
    monkeypatch.setattr("coldstream.kvcache.prefix.cache.MAX_PASSED_TOKENS", 1000)
    cache = PrefixCache(memory, max_states=1)
    for start in (0, 1000, 2000, 0, 3000, 4000):
        memory.release(cache.begin(text(start, 200)).sequence)
        cache.check_integrity()
    parted = [cache.begin(text(start, 100) + [5] * 100).checkpoints for start in (0, 1000)]
    assert parted == [(100,), (199,)]
    memory.release(cache.begin(text(7000, 1001)).sequence)
    cache.check_integrity()
    assert cache.statistics().remembered_tokens <= 1000


def test_wrong_calls_change_nothing(memory: Memory) -> None:
    cache = PrefixCache(memory, max_states=4)
    with pytest.raises(InvalidRequestError, match="without tokens"):
        cache.begin([])
    sequence = memory.new_sequence()
    cache.keep([1], sequence)
    memory.extend(sequence, text(0, 300))
    with pytest.raises(InvalidRequestError, match="300 tokens cannot be kept with 299"):
        cache.keep(text(0, 299), sequence)
    with pytest.raises(InvalidRequestError, match="belongs to another model"):
        PrefixCache(Memory(4, 4), max_states=4).keep(text(0, 300), sequence)
    cache.check_integrity()
    assert cache.statistics().prompts == cache.statistics().kept == 0
    assert cache.pin(text(0, 300)) is None


def test_gaps_of_checkpoints_are_filled_only_as_far_as_states_allow(memory: Memory) -> None:
    checkpoints = PrefixCache(memory, max_states=4).begin(text(0, 15_000)).checkpoints
    assert len(checkpoints) == 2
    assert all(before < after for before, after in pairwise(checkpoints))


def test_a_model_without_recurrent_layers_begins_with_any_part_of_what_is_kept() -> None:
    memory = Memory(60, 20, "none")
    cache = PrefixCache(memory, max_states=8)
    computed(cache, memory, text(0, 7000))
    assert cache.statistics().keeps == 1
    for parting in (6999, 6200, 257, 256, 1):
        assert computed(cache, memory, text(0, parting) + text(9000, 100)) == parting
    assert computed(cache, memory, text(0, 300)) == 299
    cache.check_integrity()


def test_what_a_longer_prefix_has_too_goes_at_once_without_recurrent_layers() -> None:
    memory = Memory(60, 20, "none")
    cache = PrefixCache(memory, max_states=2)
    for ids in (text(0, 2000), text(5000, 50), text(0, 2100)):
        computed(cache, memory, ids)
    assert cache.begin(text(5000, 50)).length == 49
    assert cache.begin(text(0, 2100)).length == 2099
    short = memory.new_sequence()
    memory.extend(short, text(0, 70))
    cache.keep(text(0, 70), short)
    assert (cache.statistics().kept, cache.statistics().evictions) == (2, 0)


def test_a_sequence_that_is_a_part_of_a_kept_prefix_can_own_its_memory() -> None:
    memory = Memory(2, 4, "none")
    cache = PrefixCache(memory, max_states=2)
    sequence = memory.new_sequence()
    memory.extend(sequence, text(0, 512))
    cache.keep(text(0, 512), sequence)
    memory.release(sequence)
    prefix = cache.begin(text(0, 300) + text(9000, 212))
    assert prefix.length == 300
    assert not cache.make_room(CacheSize(1, 0))
    cache.forget(text(0, 300))
    assert memory.need(prefix.sequence, 212) == CacheSize(0, 0)
