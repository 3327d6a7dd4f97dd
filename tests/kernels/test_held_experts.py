"""Experts that a pool keeps in place for other readers, and a server that computes from a pool."""

import ctypes
import os
import threading
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from cpu_cases import same_bits
from expert_client import ROWS, ExpertClient
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import ExpertFile, owners
from quant_cases import load
from random_blocks import activations
from test_cpu_experts import NUM_EXPERTS, E, experts, run

from coldstream.errors import ModelChangedError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc

K_TYPES = (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)
NUM_LAYERS, RANKS = 3, 3


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    path = tmp_path_factory.mktemp("experts") / "experts.bin"
    return ExpertFile(path, [experts(*K_TYPES) for _ in range(NUM_LAYERS)])


def bytes_of(file: ExpertFile, layer: int, expert: int) -> list[bytes]:
    return [stack.blocks[expert].numpy().tobytes() for stack in file.layers[layer]]


def bytes_at(file: ExpertFile, layer: int, addresses: list[int]) -> list[bytes]:
    sizes = [num_bytes for _, _, num_bytes in file.parts[layer]]
    return [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]


class Client(ExpertClient):
    """Asks a server of all layers of a file, which has them through a pool."""

    def __init__(self, pool: _csrc.ExpertPool, file: ExpertFile, *, is_prefill: bool = False) -> None:
        super().__init__(E, RANKS, is_prefill=is_prefill)
        for layer in range(len(file.layers)):
            assert self.server.add_layer(*file.weights(pool, layer), pool) == layer
        self.server.begin()

    def check(self, file: ExpertFile, layer: int, seed: int, rows: int, elsewhere: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.rand(rows, NUM_EXPERTS, generator=generator).argsort(dim=-1)[:, :RANKS].int()
        ids = ids.masked_fill(torch.rand(rows, RANKS, generator=generator) < elsewhere, -1).contiguous()
        x, expected = activations(seed, rows, E), torch.full((rows, RANKS, E), 7.0)
        _csrc.routed_experts(self.runtime, x, ids, *(load(stack) for stack in file.layers[layer]), expected)
        assert same_bits(self.ask(layer, x, ids), expected)
        self.server.check()


@settings(max_examples=100)
@given(
    data=st.data(),
    num_slots=st.integers(1, NUM_EXPERTS + 2),
    num_staging=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_a_held_expert_stays_where_it_is_and_others_find_a_slot(
    file: ExpertFile, data: st.DataObject, num_slots: int, num_staging: int, seed: int
) -> None:
    """Any order of steps, holds and releases; each step's experts have their bits."""
    # What can be held depends on which reads had ended, and so must no draw of hypothesis.
    choices = Random(seed)
    pool, runtime = file.pool(num_slots, num_staging), _csrc.Runtime(1)
    held: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[int, int], list[int]] = {}
    free_of_holds = min(num_staging, num_slots)
    last = NUM_LAYERS
    for _ in range(data.draw(st.integers(1, 12), "layers")):
        layer = data.draw(st.integers(0, NUM_LAYERS - 1), "layer")
        if layer <= last:
            pool.begin_step(data.draw(st.booleans(), "prefill"))
        last = layer
        ids = torch.tensor(
            data.draw(st.lists(st.permutations(range(NUM_EXPERTS)), min_size=1, max_size=3), "ids"),
            dtype=torch.int32,
        )[:, :RANKS].contiguous()
        x = activations(1, len(ids), E)
        assert same_bits(file.run(runtime, pool, layer, x, ids), run(runtime, x, ids, file.layers[layer]))
        for expert in {int(each) for each in ids.reshape(-1)}:
            key, is_there = (layer, expert), layer * NUM_EXPERTS + expert in owners(pool)
            if choices.random() < 0.5:
                continue
            found = pool.hold(layer, expert)
            allowed = held[key] or num_slots - len(+held) > free_of_holds
            assert (found is not None) == (is_there and bool(allowed))
            if found is not None:
                held[key] += 1
                places.setdefault(key, found)
        for key in list(+held):
            assert bytes_at(file, key[0], places[key]) == bytes_of(file, *key)
            if choices.random() < 0.5:
                pool.release(*key)
                held[key] -= 1
                if not held[key]:
                    del places[key]
    pool.clear()
    assert set(owners(pool)) == {layer * NUM_EXPERTS + expert for layer, expert in +held}


def test_what_is_not_held_or_does_not_exist_is_refused(file: ExpertFile) -> None:
    pool = file.pool(4, 1)
    pool.begin_step(False)
    pool.preload(1, [2])
    assert pool.hold(1, 3) is None, "it is on the disk"
    with pytest.raises(ValueError, match="not held"):
        pool.release(1, 2)
    assert pool.hold(1, 2) is not None
    pool.release(1, 2)
    for layer, expert in ((-1, 0), (NUM_LAYERS, 0), (0, -1), (0, NUM_EXPERTS)):
        with pytest.raises(IndexError):
            pool.hold(layer, expert)


@pytest.mark.sharded(6)
@pytest.mark.parametrize("num_slots", [1, 3, NUM_EXPERTS * NUM_LAYERS])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_a_server_computes_what_a_pool_reads(file: ExpertFile, num_slots: int, is_prefill: bool) -> None:
    pool = file.pool(num_slots)
    client = Client(pool, file, is_prefill=is_prefill)
    for seed, rows in enumerate((1, 1, 16, 2, 11, 1)):
        for layer in range(NUM_LAYERS):
            client.check(file, layer, seed, rows, elsewhere=(0.0, 0.3, 1.0)[seed % 3])
    hits, misses, _, num_bytes, _ = pool.count()
    assert misses > 0 < num_bytes
    assert hits > 0 or num_slots < NUM_EXPERTS


@pytest.mark.sharded(of="kernels")
def test_two_servers_and_holds_of_other_threads_share_a_pool(file: ExpertFile) -> None:
    """Servers alternate by layers; holds, orders, counts and bytes from elsewhere come at any time."""
    pool, ends = file.pool(5), threading.Event()
    clients = [Client(pool, file), Client(pool, file, is_prefill=True)]
    problems: list[str] = []

    def disturb() -> None:
        rng = np.random.default_rng(3)
        while not ends.is_set():
            layer, expert = int(rng.integers(NUM_LAYERS)), int(rng.integers(NUM_EXPERTS))
            if (found := pool.hold(layer, expert)) is not None:
                pool.set_order(0, rng.permutation(5))
                if bytes_at(file, layer, found) != bytes_of(file, layer, expert):
                    problems.append(f"expert {expert} of layer {layer}")
                pool.release(layer, expert)
            if (reserved := pool.reserve(layer, expert, 5)) is not None:
                slot, addresses = reserved
                for address, content in zip(addresses, bytes_of(file, layer, expert), strict=True):
                    ctypes.memmove(address, content, len(content))
                pool.deliver(layer, expert, slot, True)
            pool.owners(0)
            pool.count()

    def ask(client: Client) -> None:
        try:
            for seed in range(30):
                client.check(file, seed % NUM_LAYERS, seed, 1 + seed % ROWS)
        except AssertionError as error:
            problems.append(str(error))

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    disturber = threading.Thread(target=disturb)
    for thread in (disturber, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ends.set()
    disturber.join()
    assert not problems


def test_fl01_a_file_that_shrinks_is_an_error_and_what_is_there_again_is_computed(tmp_path: Path) -> None:
    file = ExpertFile(tmp_path / "experts", [experts(*K_TYPES) for _ in range(NUM_LAYERS)])
    content, pool = file.path.read_bytes(), file.pool(4)
    client = Client(pool, file)
    client.check(file, 0, 1, 2)
    os.truncate(file.path, 4096)
    for layer in (0, 1):
        client.ask(layer, activations(1, 2, E), torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32))
        with pytest.raises(ModelChangedError, match="changed while in use: byte"):
            client.server.check()
    file.path.write_bytes(content)
    for layer in (2, 0, 1):
        client.check(file, layer, 5, 2)


def test_experts_of_a_pool_need_it_and_others_have_none(file: ExpertFile) -> None:
    pool, other = file.pool(2), file.pool(2)
    client = Client(pool, file)
    gate, up, down = file.weights(pool, 0)
    elsewhere = file.weights(pool, 1)[1]
    mapped = load(file.layers[0][0])
    for weights, its_pool in (
        ((gate, up, down), None),
        ((gate, up, down), other),
        ((gate, elsewhere, down), pool),
        ((mapped, up, down), pool),
    ):
        with pytest.raises(ValueError, match="must lie in one layer of the pool given"):
            client.server.add_layer(*weights, its_pool)
