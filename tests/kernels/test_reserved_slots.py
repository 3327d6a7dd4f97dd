"""Slots of a pool for experts whose bytes come from elsewhere than the file."""

import ctypes

import numpy as np
import pytest
import torch
from cpu_cases import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import ExpertFile
from random_blocks import activations
from test_cpu_experts import NUM_EXPERTS, E, experts, run

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc

K_TYPES = (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)
NUM_LAYERS, NUM_SLOTS = 2, 5
NUM_ALL = NUM_LAYERS * NUM_EXPERTS
EVENTS = ("step", "step", "reserve", "reserve", "deliver", "lose")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    path = tmp_path_factory.mktemp("experts") / "experts.bin"
    return ExpertFile(path, [experts(*K_TYPES) for _ in range(NUM_LAYERS)])


def write(file: ExpertFile, number: int, addresses: list[int], *, is_whole: bool) -> None:
    layer, expert = divmod(number, NUM_EXPERTS)
    for address, stack in zip(addresses, file.layers[layer], strict=True):
        content = stack.blocks[expert].numpy().tobytes()
        ctypes.memmove(address, content if is_whole else bytes(len(content)), len(content))


@settings(max_examples=100)
@given(
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, NUM_ALL - 1)), max_size=30),
    num_staging=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_a_reserved_slot_is_nobodys_until_its_bytes_are_there(
    file: ExpertFile, events: list[tuple[str, int]], num_staging: int, seed: int
) -> None:
    """In any order with steps, whose experts have their bits."""
    rng = np.random.default_rng(seed)
    pool, runtime = file.pool(NUM_SLOTS, num_staging), _csrc.Runtime(1)
    reserved: dict[int, tuple[int, list[int]]] = {}  # by expert
    for event, number in events:
        layer, expert = divmod(number, NUM_EXPERTS)
        before = pool.owners(0).tolist()
        if event == "step":
            pool.begin_step(bool(rng.random() < 0.3))
            ids = torch.from_numpy(
                rng.permuted(np.tile(np.arange(NUM_EXPERTS, dtype=np.int32), (2, 1)), axis=1)
            )
            ids = ids[:, :3].contiguous()
            x = activations(1, len(ids), E)
            assert same_bits(file.run(runtime, pool, layer, x, ids), run(runtime, x, ids, file.layers[layer]))
        elif event == "reserve" and number not in reserved:
            order = rng.permutation(NUM_SLOTS)
            pool.set_order(0, order)
            num_worse = int(rng.integers(NUM_SLOTS + 1))
            found = pool.reserve(layer, expert, num_worse)
            if number in before or NUM_SLOTS - len(reserved) <= num_staging:
                assert found is None
            if found is not None:
                assert found[0] not in {slot for slot, _ in reserved.values()}
                assert before[found[0]] < 0 or found[0] in order[:num_worse]
                reserved[number] = found
                write(file, number, found[1], is_whole=False)
        elif event in ("deliver", "lose") and reserved:
            number = sorted(reserved)[number % len(reserved)]
            slot, addresses = reserved.pop(number)
            write(file, number, addresses, is_whole=event == "deliver")
            pool.deliver(*divmod(number, NUM_EXPERTS), slot, event == "deliver")
            is_new = event == "deliver" and number not in before
            assert pool.owners(0)[slot] == (number if is_new else -1)
        in_memory = [owner for owner in pool.owners(0).tolist() if owner >= 0]
        assert len(set(in_memory)) == len(in_memory)
        assert all(pool.owners(0)[slot] < 0 for slot, _ in reserved.values())


def test_what_was_delivered_is_computed_without_the_disk(file: ExpertFile) -> None:
    pool, runtime = file.pool(NUM_SLOTS, 1), _csrc.Runtime(1)
    for expert in range(3):
        found = pool.reserve(1, expert, 0)
        assert found is not None
        slot, addresses = found
        write(file, NUM_EXPERTS + expert, addresses, is_whole=True)
        pool.deliver(1, expert, slot, True)
    pool.begin_step(False)
    ids, x = torch.tensor([[2, 0, 1]], dtype=torch.int32), activations(1, 1, E)
    assert same_bits(file.run(runtime, pool, 1, x, ids), run(runtime, x, ids, file.layers[1]))
    assert pool.count()[:2] == (3, 0)


@pytest.mark.parametrize("num_staging", [1, 2, 3])
def test_slots_for_staging_are_not_reserved(file: ExpertFile, num_staging: int) -> None:
    pool = file.pool(NUM_SLOTS, num_staging)
    found = [pool.reserve(0, expert, NUM_SLOTS) for expert in range(NUM_SLOTS)]
    assert [each is not None for each in found] == [i < NUM_SLOTS - num_staging for i in range(NUM_SLOTS)]


def test_an_expert_that_a_step_has_read_meanwhile_stays_where_it_is(file: ExpertFile) -> None:
    pool, runtime = file.pool(NUM_SLOTS, 1), _csrc.Runtime(1)
    found = pool.reserve(0, 1, 0)
    assert found is not None
    slot, addresses = found
    pool.begin_step(False)
    ids, x = torch.tensor([[1]], dtype=torch.int32), activations(1, 1, E)
    file.run(runtime, pool, 0, x, ids)
    write(file, 1, addresses, is_whole=True)
    pool.deliver(0, 1, slot, True)
    assert pool.owners(0).tolist().count(1) == 1
    assert pool.owners(0)[slot] == -1


def test_what_is_not_reserved_is_refused(file: ExpertFile) -> None:
    pool = file.pool(4, 1)
    pool.begin_step(False)
    for slot in (-1, 0, 4):
        with pytest.raises(ValueError, match="not reserved"):
            pool.deliver(0, 1, slot, True)
    with pytest.raises(IndexError):
        pool.reserve(0, NUM_EXPERTS, 4)
    with pytest.raises(IndexError):
        pool.deliver(NUM_LAYERS, 0, 0, True)
