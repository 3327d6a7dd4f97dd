"""A pool in RAM beside a GPU: where its experts lie, and which of them are overwritten first."""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from stream_cases import NUM_EXPERTS, NUM_LAYERS, open_host

from builders import write_gguf
from coldstream.errors import ModelChangedError
from coldstream.experts.cpu.pooled_stacks import PooledStacks, _least
from coldstream.experts.host import HostExperts
from coldstream.experts.partial_tables import PartialTables
from coldstream.experts.ram_pool import RamPool
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.executor import ResidentExecutor
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.models.expert_stacks import expert_stacks
from coldstream.models.read_spec import read_spec
from device_seams import model_device
from host_device import HostMemory

NUM_ALL = NUM_LAYERS * NUM_EXPERTS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path)
    with GGUFFile.open(path) as opened:
        yield opened


@contextmanager
def opened(file: GGUFFile, num_slots: int) -> Iterator[tuple[HostExperts, RamPool]]:
    with model_device(0):
        host, _ = open_host(file, num_slots)
        assert host.pool is not None
        yield host, host.pool
        host.close()


def held(pool: RamPool) -> set[int]:
    return {int(owner) for owner in pool.stacks.pool.owners(0) if owner >= 0}


def ask(host: HostExperts, layer: int, experts: list[int]) -> None:
    """Has the CPU compute experts, as for a prompt."""
    host.bulk_server.begin()
    ids = np.pad(np.array([experts], np.int32), ((0, 0), (0, 3 - len(experts))), mode="edge")
    host.choose_bulk(ids, experts, NUM_EXPERTS)
    host.ask_bulk(layer, len(ids))
    deadline = time.monotonic() + 20
    while not host.bulk_done[0]:
        assert time.monotonic() < deadline, "no answer came"
    host.bulk_server.end()
    host.bulk_server.check()


@given(data=st.data())
def test_experts_of_the_gpu_go_first_and_then_those_of_the_lowest_scores(
    file: GGUFFile, data: st.DataObject
) -> None:
    num_slots = 9
    with opened(file, num_slots) as (host, pool):
        before = data.draw(st.permutations(range(NUM_ALL)), "experts")[:num_slots]
        pool.load(
            [sorted(n % NUM_EXPERTS for n in before if n // NUM_EXPERTS == i) for i in range(NUM_LAYERS)]
        )
        assert held(pool) == set(before)
        scores = np.array(data.draw(st.permutations(range(NUM_ALL)), "scores"), np.float64)
        on_gpu = np.array(data.draw(st.lists(st.booleans(), min_size=NUM_ALL, max_size=NUM_ALL), "on gpu"))
        pool.order(scores, on_gpu)
        layer = data.draw(st.integers(0, NUM_LAYERS - 1), "layer")
        absent = [i for i in range(NUM_EXPERTS) if layer * NUM_EXPERTS + i not in before]
        if not absent:
            return
        ask(host, layer, absent[:1])
        (gone,) = set(before) - held(pool)
        assert gone == min(before, key=lambda number: (not on_gpu[number], scores[number]))


def test_the_bytes_of_slots_are_those_of_each_size(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, types={"blk.1.ffn_down_exps.weight": "Q4_K"})
    with GGUFFile.open(path) as file:
        stacks = PooledStacks(file, expert_stacks(file, read_spec(file.metadata, file.tensors)))
        assert stacks.slot_bytes == 0
        large, small = sorted(set(stacks.expert_bytes), reverse=True)
        assert small == stacks.expert_bytes[1]
        stacks.allocate({large: 5, small: 2}, 1)
        assert stacks.slot_bytes == 5 * large + 2 * small


@pytest.mark.parametrize("fused", [False, True])
def test_trap_20_held_addresses_are_those_of_the_experts_bytes(tmp_path: Path, fused: bool) -> None:
    """Also where gate and up are rows of one tensor, and layers have experts of several sizes."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, types={"blk.1.ffn_down_exps.weight": "Q4_K"}, fused_experts=fused)
    with GGUFFile.open(path) as file, model_device(0):
        spec = read_spec(file.metadata, file.tensors)
        stacks = PooledStacks(file, expert_stacks(file, spec))
        pool = RamPool(stacks, dict.fromkeys(stacks.expert_bytes, 2 * spec.num_experts), 2)
        host = HostExperts(
            1, Mailbox.create(2, spec.hidden_size), Mailbox.create(2, spec.hidden_size, 1), 8, pool
        )
        pool.empty()
        ops = CudaOps(HostMemory(), 256, 512, ResidentExecutor)
        tables = PartialTables(ops.memory, host, ())
        for layer in range(spec.num_layers):
            names = ["gate_up", "down"] if fused else ["gate", "up", "down"]
            found = [
                tables.map_stack(file, file.tensors[f"blk.{layer}.ffn_{name}_exps.weight"]) for name in names
            ]
            assert None not in found
            if fused:
                half = found[0].rows // 2  # type: ignore[union-attr]
                found = [*ops.split_rows(found[0], (half, half)), found[1]]  # type: ignore[arg-type,list-item]
            host.add_layer(found)  # type: ignore[arg-type]
            pool.stacks.pool.preload(layer, [1, 2])
            for expert in (1, 2):
                addresses = pool.hold(layer, expert)
                assert addresses is not None
                for address, table in zip(addresses, found, strict=True):
                    assert table is not None
                    expected = ctypes.string_at(table.source + expert * table.step, table.matrix_bytes)
                    assert ctypes.string_at(address, table.matrix_bytes) == expected
                pool.release(layer, expert)
            assert pool.hold(layer, 3) is None
        host.close()


def test_experts_are_brought_in_portions_that_may_be_held(file: GGUFFile) -> None:
    numbers = [0, 1, 2, 5, 8, 9, NUM_ALL - 1]
    with opened(file, 4) as (_, pool):
        portions = []
        for portion in pool.brought(numbers):
            keys = [divmod(number, NUM_EXPERTS) for number in portion]
            assert all(pool.hold(*key) for key in keys)
            for key in keys:
                pool.release(*key)
            portions.append(portion)
        assert portions == [[0, 1], [2, 5], [8, 9], [NUM_ALL - 1]]
        assert not held(pool)


def test_an_expert_of_the_gpu_goes_before_one_that_nobody_has_used(file: GGUFFile) -> None:
    """Though it scores highest, and the other one nothing."""
    with opened(file, 3) as (host, pool):
        pool.load([[1, 2, 3]])
        scores, on_gpu = np.zeros(NUM_ALL), np.zeros(NUM_ALL, bool)
        scores[[1, 2, 3]], on_gpu[3] = (0, 5, 9), True
        pool.order(scores, on_gpu)
        ask(host, 0, [4])
        assert held(pool) == {1, 2, 4}


@given(data=st.data())
def test_an_expert_that_leaves_the_gpu_takes_the_place_of_one_that_is_worth_less(
    file: GGUFFile, data: st.DataObject
) -> None:
    """Of the one that is worth least; and none, where all others are worth more."""
    num_slots = 6
    with opened(file, num_slots) as (_, pool):
        before = data.draw(st.permutations(range(NUM_ALL)), "experts")[:num_slots]
        pool.load(
            [sorted(n % NUM_EXPERTS for n in before if n // NUM_EXPERTS == i) for i in range(NUM_LAYERS)]
        )
        scores = np.array(data.draw(st.permutations(range(NUM_ALL)), "scores"), np.float64)
        number = data.draw(st.integers(0, NUM_ALL - 1), "leaves")
        on_gpu = np.zeros(NUM_ALL, bool)
        on_gpu[before[: data.draw(st.integers(0, 3), "on gpu")]] = True
        on_gpu[number] = False
        pool.order(scores, on_gpu)
        room = pool.room_for(*divmod(number, NUM_EXPERTS))
        worst = min(before, key=lambda each: (not on_gpu[each], scores[each]))
        if number in before or not (on_gpu[worst] or scores[worst] < scores[number]):
            assert room is None
            assert held(pool) == set(before)
            return
        assert room is not None
        assert held(pool) == set(before) - {worst}
        is_whole = data.draw(st.booleans(), "whole")
        pool.take_back(room, is_whole=is_whole)
        assert held(pool) == set(before) - {worst} | ({number} if is_whole else set())
        if is_whole:
            assert pool.hold(*divmod(number, NUM_EXPERTS)) == room.addresses
            pool.release(*divmod(number, NUM_EXPERTS))


@given(data=st.data())
def test_what_the_gpu_may_read_leaves_the_first_slots_in_the_order_to_others(
    file: GGUFFile, data: st.DataObject
) -> None:
    """Of the experts in the pool, without those that it has itself."""
    num_slots = data.draw(st.integers(5, 12), "slots")
    with opened(file, num_slots) as (_, pool):
        before = data.draw(st.permutations(range(NUM_ALL)), "experts")
        before = before[: data.draw(st.integers(0, num_slots), "filled")]
        pool.load(
            [sorted(n % NUM_EXPERTS for n in before if n // NUM_EXPERTS == i) for i in range(NUM_LAYERS)]
        )
        scores = np.array(data.draw(st.permutations(range(NUM_ALL)), "scores"), np.float64)
        on_gpu = np.array(data.draw(st.lists(st.booleans(), min_size=NUM_ALL, max_size=NUM_ALL), "on gpu"))
        pool.order(scores, on_gpu)
        in_order = sorted(before, key=lambda number: (not on_gpu[number], scores[number]))
        num_spare = min(NUM_LAYERS, num_slots // 2)  # of a token that uses one expert of a layer
        expected = {number for number in in_order[num_spare:] if not on_gpu[number]}
        assert set(np.flatnonzero(pool.lasting).tolist()) == expected


def test_nothing_comes_back_to_memory_that_is_not_locked_and_the_gpu_reads_nothing_there(
    file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_locked in (True, False):
        with monkeypatch.context() as patch, opened(file, 6) as (_, pool):
            if not is_locked:
                patch.setattr(RegisteredMemory, "register", lambda *_, **__: None)
                pool.empty()
            pool.load([[0, 1, 3, 4]])
            pool.order(np.arange(NUM_ALL, dtype=np.float64), np.zeros(NUM_ALL, bool))
            assert pool.lasting.any() == is_locked
            assert (pool.room_for(1, 2) is not None) == is_locked


def test_what_was_done_before_the_pool_was_emptied_does_not_count(file: GGUFFile) -> None:
    with opened(file, 6) as (host, pool):
        ask(host, 0, [1, 2])
        ask(host, 0, [1, 2])
        before = pool.statistics()
        assert min(before.hits, before.misses, before.bytes_read) > 0
        assert before.wait_s > 0
        pool.empty()
        after = pool.statistics()
        assert (after.hits, after.misses, after.bytes_read, after.wait_s, after.retries) == (0, 0, 0, 0, 0)
        ask(host, 0, [1])
        assert pool.statistics().misses == 1


def test_progress_is_reported_and_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    with GGUFFile.open(path) as file, opened(file, 6) as (_, pool):
        reported: list[tuple[int, int]] = []
        pool.load([[1, 2], [], [3]], lambda done, total: reported.append((done, total)))
        assert reported == [(2, 3), (3, 3)]
        statistics = pool.statistics()
        assert (statistics.num_slots, statistics.num_experts) == (6, NUM_ALL)
        assert statistics.bytes_read > 0
        with path.open("r+b") as written:
            written.truncate(4096)
        with pytest.raises(ModelChangedError, match="changed while in use"):
            pool.load([[5]])


def test_memory_is_locked_once_and_given_back(file: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that of the pool, which the host may write."""
    calls: list[tuple[int, int, bool]] = []
    register = RegisteredMemory.register

    def registered(address: int, num_bytes: int, *, is_read_only: bool = True) -> RegisteredMemory | None:
        calls.append((address, num_bytes, is_read_only))
        return register(address, num_bytes, is_read_only=is_read_only)

    closed: list[int] = []
    monkeypatch.setattr(RegisteredMemory, "register", registered)
    monkeypatch.setattr(RegisteredMemory, "close", lambda memory: closed.append(memory._pieces[0]))
    with opened(file, 4) as (host, pool):
        address, num_bytes = pool.stacks.pool.memory()
        assert calls == [(address, num_bytes, False)]
        assert not host.is_readable
        assert torch.tensor(pool.stacks.slot_bytes) == num_bytes
    pool.close()
    assert closed == [address]


@given(
    values=st.lists(st.floats(-1e6, 1e6), max_size=40),
    most=st.integers(1, 30),
)
def test_the_least_values_come_first(values: list[float], most: int) -> None:
    found = _least(np.array(values), most)
    assert len(set(found.tolist())) == len(found)
    assert [values[place] for place in found] == sorted(values)[:most]
