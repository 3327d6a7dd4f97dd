"""Prefetched experts on the host: which ones, complete or not at all, keys and counts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_cuda_prefetch import wanted

from coldstream.experts.prefetch import MAX_PREFETCHED, Prefetching
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import ALIGNMENT
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.prefetch import TALLIES
from coldstream.kernels.experts.shapes import MAX_RANKS
from coldstream.kernels.experts.split import BY_FETCHES, BY_SHARED_CPU, BY_SHARED_FETCHES, NUM_WORDS
from coldstream.kernels.experts.table import ExpertTable

pytestmark = pytest.mark.usefixtures("host")

EXPERTS, RANKS, LAYERS, COLS = 40, 4, 6, 64
# Types of gate, up and down: their bytes are a multiple of 16, or only of 2.
ROWS = {QuantType.F32: (6, 6, 3), QuantType.Q8_0: (5, 5, 3)}


def _no_slots() -> torch.Tensor:
    return torch.zeros(EXPERTS, dtype=torch.int64)


class Memory:
    """Experts of a layer without slots in the host's memory."""

    def __init__(self, quant_type: QuantType, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = [rows * quant_type.row_bytes(COLS) for rows in ROWS[quant_type]]
        self.bytes = [
            torch.randint(256, (EXPERTS, size), dtype=torch.uint8, generator=generator) for size in sizes
        ]
        self.stacks = [
            ExpertTable(
                torch.zeros(EXPERTS).long(), quant_type, rows, COLS, True, None, data.data_ptr(), size
            )
            for rows, data, size in zip(ROWS[quant_type], self.bytes, sizes, strict=True)
        ]
        self.place_bytes = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def in_pool(self, experts: set[int]) -> None:
        """The device reads these in a pool, in another order, and no others."""
        self._pool = [data.flip(0).contiguous() for data in self.bytes]
        tables = [
            torch.tensor([places[-1 - e].data_ptr() if e in experts else 0 for e in range(EXPERTS)])
            for places in self._pool
        ]
        self.stacks = [
            replace(stack, mapped=0, step=0, pooled=table)
            for stack, table in zip(self.stacks, tables, strict=True)
        ]


def ring_of(distance: int, count: int, memory: Memory) -> PrefetchRing:
    def zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    data = zeros(((distance + 1) * count * memory.place_bytes + 100,), "uint8")
    return PrefetchRing(Prefetching(distance, count), data, zeros, LAYERS)


def table(*counts: tuple[slice, Sequence[int]]) -> torch.Tensor:
    """`MissTimes` of the device with these counts by numbers of missing experts."""
    words = torch.zeros(NUM_WORDS, dtype=torch.int32)
    for where, numbers in counts:
        words[where] = torch.tensor(numbers, dtype=torch.int32)
    return words


ANY = range(MAX_RANKS + 1)
ALL_IN_TIME = table((BY_FETCHES, ANY), (BY_SHARED_FETCHES, ANY))


def fetch(
    ring: PrefetchRing,
    layer: int,
    guesses: Sequence[Sequence[int]],
    memory: Memory,
    reached: int,
    times: torch.Tensor = ALL_IN_TIME,
) -> None:
    """When so many layers have been shared out."""
    ring._reached.fill_(reached)
    ring.fetch(layer, torch.tensor(guesses, dtype=torch.int32), memory.stacks, times)
    assert not ring._arrivals.any(), "blocks are counted from 0 next time"


def brought(ring: PrefetchRing, layer: int, memory: Memory) -> list[int]:
    """The experts in the places of a layer, whose bytes must be theirs."""
    keys, data = ring._part(layer)
    experts = []
    for key, place in zip(keys.tolist(), data.view(len(keys), -1), strict=True):
        if key == 0:
            continue
        number, expert = divmod(key - 1, 1 << 16)
        assert number == layer
        offset = 0
        for matrix in memory.bytes:
            size = matrix.shape[1]
            assert torch.equal(place[offset : offset + size], matrix[expert])
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        experts.append(expert)
    return experts


guess_rows = st.lists(
    st.lists(st.integers(-2, EXPERTS + 1), min_size=RANKS, max_size=RANKS), min_size=1, max_size=8
)


@given(
    guesses=guess_rows,
    count=st.integers(1, MAX_PREFETCHED),
    distance=st.integers(1, 2),
    quant_type=st.sampled_from(list(ROWS)),
    with_slots=st.sets(st.integers(0, EXPERTS - 1)),
    with_some=st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(0, 2)),
    in_pool=st.none() | st.sets(st.integers(0, EXPERTS - 1)),
    in_time=st.lists(st.integers(0, MAX_PREFETCHED), min_size=MAX_RANKS + 1, max_size=MAX_RANKS + 1),
)
@settings(max_examples=100)
def test_the_most_wanted_without_a_slot_arrive_whole(
    guesses: list[list[int]],
    count: int,
    distance: int,
    quant_type: QuantType,
    with_slots: set[int],
    with_some: dict[int, int],
    in_pool: set[int] | None,
    in_time: list[int],
) -> None:
    """Repeated and impossible guesses among them. An expert with one slot of three is missing. No more are
    copied than come in time by the table of as many tokens, and those that a pool lacks are not.
    """
    memory, layer = Memory(quant_type, count), 3
    if in_pool is not None:
        memory.in_pool(in_pool)
    for expert in with_slots:
        for stack in memory.stacks:
            stack.addresses[expert] = 1
    for expert, matrix in with_some.items():
        if expert not in with_slots:
            memory.stacks[matrix].addresses[expert] = 1
    ring = ring_of(distance, count, memory)
    in_time = [min(each, misses) for misses, each in enumerate(in_time)]
    right, wrong = (BY_FETCHES, BY_SHARED_FETCHES)[:: 1 if len(guesses) == 1 else -1]
    fetch(ring, layer, guesses, memory, layer, table((right, in_time), (wrong, in_time[::-1])))
    outside = set() if in_pool is None else set(range(EXPERTS)) - in_pool
    missing = wanted(guesses, with_slots | outside, EXPERTS)
    assert brought(ring, layer, memory) == missing[: min(count, in_time[min(len(missing), MAX_RANKS)])]
    others = [each for each in range(distance + 1) if each != layer % (distance + 1)]
    assert not ring._keys[others].any(), "nor any place of another layer"


def test_nothing_arrives_once_its_layer_has_been_shared_out() -> None:
    memory = Memory(QuantType.F32, 1)
    ring = ring_of(2, 3, memory)
    fetch(ring, 4, [[7, 8, 9, 10]], memory, reached=5)
    assert brought(ring, 4, memory) == []
    assert ring.tallies[4].tolist() == [0, 0, 3]
    fetch(ring, 4, [[7, 8, 9, 10]], memory, reached=4)
    assert brought(ring, 4, memory) == [7, 8, 9]
    assert ring.tallies.sum() == 3
    assert len(TALLIES) == ring.tallies.shape[1]


@given(
    guesses=guess_rows.filter(lambda rows: len(rows) > 1),
    count=st.integers(1, MAX_PREFETCHED),
    with_slots=st.sets(st.integers(0, EXPERTS - 1)),
    num_fetched=st.integers(0, 3),
    num_on_cpu=st.integers(0, MAX_RANKS),
    reached=st.sampled_from([3, 4]),
)
@example(
    guesses=[[0, 1, 2, 3]] * 2, count=2, with_slots=set(), num_fetched=2, num_on_cpu=MAX_RANKS, reached=3
)
@settings(max_examples=60)
def test_the_cpu_expects_of_several_tokens_what_is_left_for_it(
    guesses: list[list[int]],
    count: int,
    with_slots: set[int],
    num_fetched: int,
    num_on_cpu: int,
    reached: int,
) -> None:
    """Of what is neither in a slot nor copied: those of the fewest tokens, which the bus reads last."""
    memory, layer, box = Memory(QuantType.F32, count), 3, Mailbox.planned(RANKS, COLS, 8)
    for expert in with_slots:
        for stack in memory.stacks:
            stack.addresses[expert] = 1
    ring, width = ring_of(2, count, memory), MAX_RANKS + 1
    ring._reached.fill_(reached)
    times = table((BY_SHARED_FETCHES, [num_fetched] * width), (BY_SHARED_CPU, [num_on_cpu] * width))
    ring.expect(layer, torch.tensor(guesses, dtype=torch.int32), memory.stacks, times, box)
    words = box.ahead.numpy().tolist()
    if reached > layer:
        assert not any(words), "its experts have been asked for"
        return
    rest = wanted(guesses, with_slots, EXPERTS)[min(count, num_fetched) :]
    demand = Counter(guess for row in guesses for guess in row)
    expected = sorted(rest, key=lambda expert: (demand[expert], -expert))[: min(RANKS, num_on_cpu)]
    padded = expected + [-1] * (RANKS - len(expected))
    assert words[:RANKS] == [(layer + 1) << 16 | (expert + 1) for expert in padded]
    assert not any(words[RANKS:])
    assert not ring._keys.any()
