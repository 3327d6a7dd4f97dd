"""Experts in a device's slots: copies, writes of tables, and their order."""

import ctypes
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver
from residency_cases import (
    LAYERS,
    LOCKED_LAYERS,
    NUM_EXPERTS,
    SIZES,
    SLOTS_OF_A_SIZE,
    SmallPool,
    expert_at,
    make_slots,
    read,
)

from coldstream.errors import DeviceError
from coldstream.experts.slots import residency
from coldstream.experts.slots.cache import ExpertCache
from coldstream.experts.slots.residency import ExpertResidency, _ExpertAddresses
from coldstream.kernels.cuda import host_memory
from coldstream.kernels.cuda.staged import ReadBack
from coldstream.kernels.experts.addresses import AddressWriter
from coldstream.kernels.experts.shapes import MATRICES
from device_model import ModelDevice, Operation, Pieces, range_of
from device_seams import any_schedule, model_device, seeds
from random_residency import RandomResidency

ONE_SEGMENT = 2**16
segments = st.sampled_from([1, 2 * min(SIZES), 3 * max(SIZES), ONE_SEGMENT])
ROWS, RANKS = 2, 2


def empty_tables() -> None:
    """No expert has an address. Tests share the tables, in any order."""
    for stacks in LAYERS:
        for stack in stacks:
            stack.addresses.zero_()
            assert stack.pooled is not None
            stack.pooled.zero_()


@given(
    st.lists(st.integers(0, 3 * NUM_EXPERTS - 1), unique=True, min_size=1, max_size=6),
    st.sampled_from([1, 2 * min(SIZES), ONE_SEGMENT]),
)
def test_trap_20_tables_lead_to_the_bytes_of_their_experts(experts: list[int], segment_bytes: int) -> None:
    empty_tables()
    with model_device(0):
        slots = make_slots(segment_bytes)
        places = _ExpertAddresses(LAYERS, slots)
    arrived, in_slots = np.array(experts, np.int64), np.arange(len(experts))
    addresses = zip(experts, places.mapped(arrived), places.in_slots(arrived, in_slots), strict=True)
    for expert, sources, targets in addresses:
        for source, target, size in zip(sources, targets, places.sizes(expert), strict=True):
            ctypes.memmove(target, source, size)
    where, values = places.entries(arrived, in_slots, np.empty(0, np.int64))
    assert len(where) == len(values) == MATRICES * len(experts)
    for address, value in zip(where.tolist(), values.tolist(), strict=True):
        ctypes.c_int64.from_address(address).value = value
    for number in range(3 * NUM_EXPERTS):
        stacks = LAYERS[number // NUM_EXPERTS]
        for stack in stacks:
            found = int(stack.addresses[number % NUM_EXPERTS])
            assert (found != 0) == (number in experts)
            if found:
                expected = stack.host.values[number % NUM_EXPERTS].numpy().tobytes()
                assert read(found, len(expected)) == expected
    where, values = places.entries(np.empty(0, np.int64), np.empty(0, np.int64), arrived)
    assert not values.any()
    for address in where.tolist():
        ctypes.c_int64.from_address(address).value = 0
    assert not any(stack.addresses.any() for stacks in LAYERS for stack in stacks)


class Refusals:
    """A driver that refuses some copies, and how often it did so in a row, by expert."""

    def __init__(self, share: float, seed: int, pool: SmallPool | None = None) -> None:
        self._rng = np.random.default_rng(seed)
        self._share, self._pool = share, pool
        self.in_a_row = Counter[int]()
        self._copied = Counter[int]()  # matrices of the copy that is being queued

    def __call__(self, pieces: Pieces) -> bool:
        if len(pieces) > 1:  # copies are queued together, or else one by one
            if (self._rng.random(len(pieces)) < self._share).any():
                return True
            for _, source, _ in pieces:
                self.in_a_row[self._expert_at(source)] = 0
            return False
        ((_, source, _),) = pieces
        expert = self._expert_at(source)
        if self._rng.random() < self._share:
            self.in_a_row[expert] += 1
            self._copied[expert] = 0
            return True
        self._copied[expert] += 1
        if self._copied[expert] == MATRICES:
            self._copied[expert] = self.in_a_row[expert] = 0
        return False

    def _expert_at(self, source: int) -> int:
        return expert_at(source) if self._pool is None else self._pool.expert_at(source)

    @property
    def given_up(self) -> set[int]:
        return {expert for expert, count in self.in_a_row.items() if count >= 2}


class Steps:
    """Steps of a runner; each checks the bytes at the addresses in its tables."""

    def __init__(
        self,
        device: ModelDevice,
        segment_bytes: int,
        seed: int,
        refused: float = 0.0,
        pool: SmallPool | None = None,
    ) -> None:
        self.device, self.pool = device, pool
        self.rng = np.random.default_rng(seed)
        self.used = ReadBack(torch.zeros(3 * ROWS * RANKS, dtype=torch.int32))
        self.in_flight: deque[tuple[np.ndarray | None, Operation]] = deque()
        self.slots = make_slots(segment_bytes)
        cache = ExpertCache(SIZES, NUM_EXPERTS, self.slots.num_slots, RandomResidency(seed))
        empty_tables()
        layers = LOCKED_LAYERS if seed % 2 else LAYERS
        self.residency = ExpertResidency(layers, cache, self.slots, pool)  # type: ignore[arg-type]
        self.residency.load(range(4))
        assert np.flatnonzero(self.residency.resident).tolist() == [0, 1, 2, 3]
        self.refusals = device.refuses = Refusals(refused, seed, pool)
        self.known: set[int] = set()  # experts that an error has named as given up
        self.is_due = False  # `prepare`
        self.num_read = 0  # experts that steps have read in the pool

    def launch(self) -> Operation:
        """A step of a runner, up to where its work is queued: perhaps while the one before runs."""
        self.end(0 if len(self.in_flight) == 2 or self.rng.random() < 0.5 else 1)
        if self.pool is not None:
            self.pool.stir()
        self.residency.start_step()
        return self.queue()

    def end(self, num_running: int) -> None:
        """Waits for all steps but the last ones."""
        while len(self.in_flight) > num_running:
            ids, step = self.in_flight.popleft()
            self.device.wait_for(step)
            self.residency.ended(ids)
        if self.is_due and len(self.in_flight) < 2:
            self.prepare()

    def queue(self) -> Operation:
        """Queues a step that reads every slot, and at its end writes the experts that it used."""
        resident, values = self.residency.resident.copy(), self.used.values
        reads = self.residency._reads
        in_pool = None if reads is None else reads.readable.copy()
        used = torch.from_numpy(self.rng.integers(0, NUM_EXPERTS, values.shape, np.int32))

        def compute(operation: Operation) -> None:
            for number in range(3 * NUM_EXPERTS):
                layer, expert = divmod(number, NUM_EXPERTS)
                stacks = LAYERS[layer]
                found = [int(stack.addresses[expert]) for stack in stacks]
                assert [address != 0 for address in found] == [resident[layer, expert]] * MATRICES
                for stack, address in zip(stacks, found, strict=True):
                    if address:
                        self.device.touch(operation, reads=[(address, stack.step)])
                        expected = stack.host.values[expert].numpy().tobytes()
                        assert read(address, stack.step) == expected, f"the bytes of expert {number}"
                if in_pool is not None:
                    self.read_in_pool(operation, number, in_pool[number])
            values[:] = used

        return self.device.queue(
            "step",
            reads=[
                range_of(table)
                for stacks in LAYERS
                for stack in stacks
                for table in (stack.addresses, stack.pooled)
            ],
            writes=[range_of(values)],
            effect=compute,
        )

    def read_in_pool(self, operation: Operation, number: int, is_readable: bool) -> None:
        layer, expert = divmod(number, NUM_EXPERTS)
        for stack in LAYERS[layer]:
            assert stack.pooled is not None
            address = int(stack.pooled[expert])
            assert (address != 0) == is_readable
            if is_readable:
                address -= SmallPool.device_offset
                self.device.touch(operation, reads=[(address, stack.step)])
                assert read(address, stack.step) == stack.host.values[expert].numpy().tobytes()
        self.num_read += is_readable

    def launched(self, *, trains: bool = True) -> None:
        ids = self.used.copy().reshape(3, ROWS, RANKS)
        last = self.device.current.last
        assert last is not None
        self.in_flight.append((ids if trains else None, last))
        self.is_due = True
        if len(self.in_flight) == 1:
            self.prepare()

    def prepare(self) -> None:
        """A copy that was refused twice is an error, and everything else goes on."""
        self.is_due = False
        try:
            self.residency.prepare()
        except DeviceError:
            assert self.refusals.given_up > self.known
        else:
            assert self.refusals.given_up == self.known
        self.known = self.refusals.given_up

    def do(self, event: str) -> None:
        if event in ("shrink", "grow"):
            getattr(self, event)()
            return
        self.launch()
        if event == "failed step":
            return  # never launched
        if event == "shrink in a step":
            self.shrink()
            self.residency.start_step()
            self.queue()
        self.launched(trains=event != "prompt")

    def step(self, *, trains: bool = True) -> None:
        self.launch()
        self.launched(trains=trains)

    def shrink(self) -> bool:
        self.end(0)
        self.device.current.synchronize()
        before, size = self.slots.num_slots, self.slots.largest
        freed = self.residency.shrink()
        after = self.slots.num_slots
        assert (freed > 0) == (size is not None)
        if size is not None:
            assert before[size] - after[size] == freed // size
        assert sum(after.values()) == self.residency.num_slots
        return freed > 0

    def grow(self) -> None:
        before, missing = self.residency.num_slots, self.residency.missing_bytes
        if missing:
            self.residency.grow()
        assert (self.residency.num_slots > before) == (missing > 0)


@contextmanager
def steps_of(
    segment_bytes: int, seed: int, refused: float = 0.0, pool: SmallPool | None = None
) -> Iterator[Steps]:
    """In the end slots are given back."""
    with model_device(seed) as device, patch.object(residency, "MOST_TOGETHER", 1 + seed % 5):
        steps = Steps(device, segment_bytes, seed, refused, pool)
        yield steps
        device.current.synchronize()
        steps.residency.close()
        del steps.residency, steps.slots


@any_schedule
@given(
    segment_bytes=segments,
    events=st.lists(
        st.sampled_from(
            ["step", "step", "step", "prompt", "shrink", "shrink in a step", "failed step", "grow"]
        ),
        max_size=20,
    ),
    seed=seeds,
    refused=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_mm03_memory_given_back_at_any_moment_changes_no_byte_that_a_step_reads(
    segment_bytes: int, events: list[str], seed: int, refused: float
) -> None:
    with steps_of(segment_bytes, seed, refused) as steps:
        for event in events:
            steps.do(event)
        while steps.shrink():
            steps.step()
        assert not steps.residency.resident.any()
        while steps.residency.missing_bytes:
            steps.step()
            steps.grow()
        assert steps.residency.num_slots == SLOTS_OF_A_SIZE * len(set(SIZES))
        for _ in range(8):
            steps.step()
            steps.device.synchronize()
        given_up = steps.refusals.given_up
        assert steps.residency.resident.any() or len(given_up) > NUM_EXPERTS
        assert not steps.residency.resident.reshape(-1)[sorted(given_up)].any()


@any_schedule
@given(seed=seeds)
def test_ex04_experts_come_and_go_while_steps_read_others(seed: int) -> None:
    with steps_of(ONE_SEGMENT, seed) as steps:
        for _ in range(25):
            steps.step()
        counters = steps.residency.cache.counters
        assert not counters.failed_copies.any()
        if steps.device.is_eager:
            assert counters.evictions.sum() > 10


@any_schedule
@given(seed=seeds, num_pieces=st.sampled_from([1, 4, 15]), refused=st.sampled_from([0.0, 0.2]))
def test_ex04_experts_are_copied_from_a_pool_that_overwrites_all_others(
    seed: int, num_pieces: int, refused: float
) -> None:
    pool = SmallPool(num_pieces, seed)
    with steps_of(ONE_SEGMENT, seed, refused, pool) as steps:
        for _ in range(25):
            steps.step()
        counters = steps.residency.cache.counters
        if refused == 0.0:
            assert not counters.failed_copies.any()
            if steps.device.is_eager and num_pieces > 1:
                assert counters.evictions.sum() > 5
                assert steps.num_read > 0
        pool.lasting_share = 0.0
        for _ in range(5):
            steps.step(trains=False)  # admits no expert
            steps.device.synchronize()
        in_slots = steps.residency.cache._slot >= 0
        assert np.array_equal(steps.residency.resident.reshape(-1), in_slots), "no copy is under way for ever"
        assert not +pool.holds
        counts = counters.copies.sum() - counters.failed_copies.sum() - counters.evictions.sum()
        assert counts == np.count_nonzero(in_slots)
        pool.lasting_share = 0.5
        for _ in range(3):
            steps.step()  # whose copies may be under way at the end
    assert not +pool.holds


@any_schedule
@given(
    seed=seeds,
    num_pieces=st.sampled_from([4, 15]),
    events=st.lists(
        st.sampled_from(
            ["step", "step", "step", "prompt", "shrink in a step", "failed step", "shrink", "grow"]
        ),
        min_size=10,
        max_size=25,
    ),
)
def test_ex04_experts_that_steps_read_in_a_pool_stay_there(
    seed: int, num_pieces: int, events: list[str]
) -> None:
    """While steps overlap, experts move between all places, and the pool overwrites whatever is not held."""
    pool = SmallPool(num_pieces, seed)
    with steps_of(2 * max(SIZES), seed, pool=pool) as steps:
        for event in events:
            steps.do(event)
        for _ in range(12):
            steps.step()
        assert steps.num_read > 0
        pool.lasting_share = 0.0
        for _ in range(5):
            steps.step(trains=False)
            steps.device.synchronize()
        assert not +pool.holds
        pool.lasting_share = 0.5
        for _ in range(3):
            steps.step()
    assert not +pool.holds


@any_schedule
@given(
    seed=seeds,
    num_pieces=st.sampled_from([2, 9]),
    events=st.lists(st.sampled_from(["step", "step", "shrink", "grow"]), min_size=10, max_size=25),
)
def test_ex04_experts_that_leave_their_slots_come_back_to_a_pool(
    seed: int, num_pieces: int, events: list[str]
) -> None:
    """Before others are copied into their slots, and before the slots' memory is given back."""
    pool = SmallPool(num_pieces, seed)
    with steps_of(ONE_SEGMENT, seed, pool=pool) as steps:
        for event in events:
            getattr(steps, event)()
        pool.lasting_share = 0.0  # two pieces that the device reads leave no room
        for _ in range(12):
            steps.step()
            steps.device.synchronize()
        assert pool.num_back > 0
        for _ in range(5):
            steps.step(trains=False)
            steps.device.synchronize()
        assert not pool.is_waiting
        for _ in range(3):
            steps.step()  # whose copies may be under way at the end
    assert not pool.is_waiting


@any_schedule
@given(seed=seeds)
def test_ex01_an_expert_that_cannot_come_back_is_no_error(seed: int) -> None:
    """Its place in the pool is free again, and the file has its bytes."""
    rng, pool, num_refused = np.random.default_rng(seed), SmallPool(9, seed), 0

    def to_host(*arguments: Any) -> driver.CUresult:
        nonlocal num_refused
        if rng.random() < 0.3:
            num_refused += 1
            return driver.CUresult.CUDA_ERROR_INVALID_VALUE
        return host_memory.to_host(*arguments)

    with patch.object(residency, "to_host", to_host), steps_of(ONE_SEGMENT, seed, pool=pool) as steps:
        for _ in range(20):
            steps.step()
            steps.device.synchronize()
        for _ in range(5):
            steps.step(trains=False)
            steps.device.synchronize()
        assert not pool.is_waiting
        assert num_refused or not steps.residency.cache.counters.evictions.any()


@any_schedule
@given(seed=seeds)
def test_ex01_what_fails_behind_a_step_of_the_cache_leaves_the_next_one_sound(seed: int) -> None:
    pool = SmallPool(9, seed)
    with steps_of(ONE_SEGMENT, seed, pool=pool) as steps:
        for number in range(20):
            room_for = pool.room_for
            if number % 4 == 3:
                pool.room_for = interrupted  # type: ignore[method-assign, assignment]
            with suppress(KeyboardInterrupt):
                steps.step()
            pool.room_for = room_for  # type: ignore[method-assign]
            steps.device.synchronize()
        for _ in range(5):
            steps.step(trains=False)  # admits no expert
            steps.device.synchronize()
        in_slots = steps.residency.cache._slot >= 0
        assert np.array_equal(steps.residency.resident.reshape(-1), in_slots), "no copy is under way for ever"


def interrupted(layer: int, expert: int) -> None:
    raise KeyboardInterrupt


@any_schedule
@given(seed=seeds)
def test_ex01_a_copy_that_is_refused_twice_is_an_error_and_all_else_goes_on(seed: int) -> None:
    with steps_of(ONE_SEGMENT, seed, refused=0.3) as steps:
        for _ in range(20):
            steps.step()
        assert steps.known
        device, residency = steps.device, steps.residency
        device.refuses = lambda pieces: False
        for _ in range(5):
            steps.step(trains=False)  # admits no expert
            device.synchronize()
        in_slots = residency.cache._slot >= 0
        assert np.array_equal(residency.resident.reshape(-1), in_slots), "no copy is under way for ever"


def test_mm03_what_a_step_used_counts_once_when_memory_is_given_back_in_its_middle() -> None:
    with steps_of(1, seed=1) as steps:
        uses = [0]
        for step in range(12):
            steps.launch()
            if step % 3 == 1:
                steps.shrink()
            steps.launched()
            steps.end(1)
            counters = steps.residency.cache.counters
            uses.append(int(counters.hits.sum() + counters.misses.sum()))
        counted = np.diff(uses)
        assert counted[0] == 0  # a step is known when the next one runs
        assert (counted[1:] > 0).all()
        assert (counted <= 3 * NUM_EXPERTS).all()


@any_schedule
@given(seed=seeds)
def test_ex04_addresses_stay_until_they_are_read(seed: int) -> None:
    """However many writes are queued."""
    with model_device(seed) as device:
        table, writer = np.zeros(2, np.int64), AddressWriter(2)
        where = table.ctypes.data + 8 * np.arange(2)
        for number in range(1, 7):
            writer.write(where[: number % 2 + 1], np.array([number, -number])[: number % 2 + 1])
        device.synchronize()
        assert table.tolist() == [6, -5]


def test_all_slots_are_filled_where_one_step_starts() -> None:
    with model_device(1) as device:
        slots = make_slots(ONE_SEGMENT, NUM_EXPERTS)  # of each of the two sizes
        residency = ExpertResidency(
            LAYERS, ExpertCache(SIZES, NUM_EXPERTS, slots.num_slots, RandomResidency(1)), slots
        )
        assert residency.num_slots == 2 * NUM_EXPERTS
        residency.load(range(2 * NUM_EXPERTS))
        device.synchronize()
        for number in range(2 * NUM_EXPERTS):
            layer, expert = divmod(number, NUM_EXPERTS)
            for stack in LAYERS[layer]:
                expected = stack.host.values[expert].numpy().tobytes()
                assert read(int(stack.addresses[expert]), stack.step) == expected
        residency.close()
