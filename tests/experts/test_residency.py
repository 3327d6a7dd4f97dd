"""Where experts lie on a device: what is copied and what is written into the tables, without a device."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from coldstream.experts import residency
from coldstream.experts.cache import ExpertCache
from coldstream.experts.residency import ExpertResidency, _Places, expert_bytes
from coldstream.experts.segments import SlotSegments
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.landing import MATRICES
from coldstream.kernels.experts.table import ExpertTable
from random_residency import RandomResidency

NUM_EXPERTS = 5


class Host:
    """The experts of a matrix in the host's memory."""

    def __init__(self, table: torch.Tensor) -> None:
        self.values = table
        self.address = table.data_ptr()


def layer(rows: int, cols: int, down: QuantType, seed: int) -> list[ExpertTable]:
    stacks = []
    for number, (quant_type, size) in enumerate(
        ((QuantType.Q4_K, (rows, cols)), (QuantType.Q4_K, (rows, cols)), (down, (cols, rows)))
    ):
        step = size[0] * quant_type.row_bytes(size[1])
        values = torch.randint(
            0,
            256,
            (NUM_EXPERTS, step),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed + number),
        )
        table = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        stacks.append(ExpertTable(table, quant_type, *size, True, Host(values), 0, step))
    return stacks


LAYERS = [
    layer(256, 256, QuantType.Q6_K, 0),
    layer(256, 512, QuantType.Q4_K, 9),
    layer(256, 256, QuantType.Q6_K, 5),
]
SIZES = [expert_bytes(stacks) for stacks in LAYERS]


def read(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def slots_on_host(segment_bytes: int) -> SlotSegments:
    """Eight of each size."""
    return SlotSegments(
        dict.fromkeys(SIZES, 8), lambda size: torch.zeros(size, dtype=torch.uint8), segment_bytes
    )


@given(
    st.lists(st.integers(0, 3 * NUM_EXPERTS - 1), unique=True, min_size=1, max_size=6),
    st.sampled_from([1, 2 * min(SIZES), 2**30]),
)
def test_trap_20_tables_lead_to_the_bytes_of_their_experts(experts: list[int], segment_bytes: int) -> None:
    slots = slots_on_host(segment_bytes)
    places = _Places(LAYERS, slots)
    numbers = {expert: index for index, expert in enumerate(experts)}
    for expert, slot in numbers.items():
        for source, target, size in zip(*places.of_copy(expert, slot), strict=True):
            ctypes.memmove(target, source, size)
    arrived = np.array(experts, np.int64)
    where, values = places.entries(arrived, np.array(list(numbers.values())), np.empty(0, np.int64))
    assert len(where) == len(values) == MATRICES * len(experts)
    for address, value in zip(where.tolist(), values.tolist(), strict=True):
        ctypes.c_int64.from_address(address).value = value
    for number in range(3 * NUM_EXPERTS):
        stacks = LAYERS[number // NUM_EXPERTS]
        for stack in stacks:
            found = int(stack.addresses[number % NUM_EXPERTS])
            assert (found != 0) == (number in numbers)
            if found:
                expected = stack.host.values[number % NUM_EXPERTS].numpy().tobytes()
                assert read(found, len(expected)) == expected
    where, values = places.entries(np.empty(0, np.int64), np.empty(0, np.int64), arrived)
    assert not values.any()
    for address in where.tolist():
        ctypes.c_int64.from_address(address).value = 0
    assert not any(stack.addresses.any() for stacks in LAYERS for stack in stacks)


class HostStream:
    """Everything happens at once."""

    cuda_stream = 0

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


class HostEvent:
    def record(self, stream: HostStream) -> None:
        pass

    def query(self) -> bool:
        return True


class HostWriter:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def write(self, where: np.ndarray, values: np.ndarray) -> None:
        assert len(where) <= self._capacity
        for address, value in zip(where.tolist(), values.tolist(), strict=True):
            ctypes.c_int64.from_address(address).value = value


def copy_now(target: int, source: int, size: int, stream: int) -> tuple[object]:
    ctypes.memmove(target, source, size)
    return (residency.driver.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def host_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory and its clock in place of the device's."""
    stream = HostStream()
    monkeypatch.setattr(torch.cuda, "Stream", HostStream)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(residency, "AddressWriter", HostWriter)
    monkeypatch.setattr(residency.driver, "cuMemcpyHtoDAsync", copy_now)


class Steps:
    """Steps on a device whose memory shrinks now and then; each must find what its tables lead to."""

    def __init__(self, segment_bytes: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.used = torch.zeros((3, 2, 2), dtype=torch.int32)
        self.slots = slots_on_host(segment_bytes)
        cache = ExpertCache(SIZES, NUM_EXPERTS, self.slots.num_slots, RandomResidency(seed), copies_wait=True)
        for stacks in LAYERS:
            for stack in stacks:
                stack.addresses.zero_()
        self.residency = ExpertResidency(LAYERS, cache, self.slots, self.used)
        self.residency.load(range(4))

    def compute(self) -> None:
        """What a step reads, of everything that is in a slot."""
        places = {size: self.slots.addresses(size) for size in SIZES}
        for number in range(3 * NUM_EXPERTS):
            layer, expert = divmod(number, NUM_EXPERTS)
            found = [int(stack.addresses[expert]) for stack in LAYERS[layer]]
            assert bool(found[0]) == self.residency.resident[layer, expert]
            if not found[0]:
                assert not any(found)
                continue
            assert found[0] in places[SIZES[layer]]
            for stack, address in zip(LAYERS[layer], found, strict=True):
                expected = stack.host.values[expert].numpy().tobytes()
                assert read(address, len(expected)) == expected
        self.used[:] = torch.from_numpy(self.rng.integers(0, NUM_EXPERTS, self.used.shape))

    def shrink(self) -> bool:
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


@given(
    segment_bytes=st.sampled_from([1, 2 * min(SIZES), 3 * max(SIZES), 2**30]),
    events=st.lists(
        st.sampled_from(
            ["step", "step", "step", "prompt", "shrink", "shrink in a step", "failed step", "grow"]
        ),
        max_size=40,
    ),
    seed=st.integers(0, 3),
)
def test_mm03_memory_given_back_at_any_moment_changes_no_byte_that_a_step_reads(
    host_device: None, segment_bytes: int, events: list[str], seed: int
) -> None:
    steps = Steps(segment_bytes, seed)
    for event in events:
        if event in ("shrink", "grow"):
            getattr(steps, event)()
            continue
        rows = 0 if event == "prompt" else 2
        steps.residency.start_step(rows)
        steps.compute()
        if event == "failed step":
            continue  # never launched
        if event == "shrink in a step":
            steps.shrink()
            steps.residency.start_step(rows)
            steps.compute()
        steps.residency.launched()
    while steps.shrink():
        steps.residency.start_step(2)
        steps.compute()
        steps.residency.launched()
    assert not steps.residency.resident.any()
    while steps.residency.missing_bytes:
        steps.residency.start_step(2)
        steps.compute()
        steps.residency.launched()
        steps.grow()
    assert steps.residency.num_slots == 8 * len(set(SIZES))
    for _ in range(8):
        steps.residency.start_step(2)
        steps.compute()
        steps.residency.launched()
    assert steps.residency.resident.any()


def test_mm03_what_a_step_used_counts_once_when_memory_is_given_back_in_its_middle(host_device: None) -> None:
    steps = Steps(1, seed=1)
    uses = [0]
    for step in range(12):
        steps.residency.start_step(2)
        steps.compute()
        if step % 3 == 1:
            steps.shrink()
        steps.residency.launched()
        counters = steps.residency.cache.counters
        uses.append(int(counters.hits.sum() + counters.misses.sum()))
    counted = np.diff(uses)
    assert counted[0] == 0  # a step is known when the next one runs
    assert (counted[1:] > 0).all()
    assert (counted <= 3 * NUM_EXPERTS).all()
