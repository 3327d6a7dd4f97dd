"""Experts from a file through a pool against the same experts in memory, and the pool's order."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_cases import same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_cases import ExpertFile, owners
from quant_cases import VECTOR_TIERS, load
from random_blocks import activations, random_weight
from test_cpu_experts import EVERY_TIER, NUM_EXPERTS, E, F, distributions, experts, run

from all_pairs import all_pairs
from coldstream.errors import ModelChangedError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.quant_tensor import QuantTensor

TYPES = (
    (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K),
    (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q4_K),
    (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K),
)
FASTEST = ("generic", *VECTOR_TIERS)[-1]
MakeFile = Callable[..., ExpertFile]


@pytest.fixture(scope="module")
def expert_file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    """Three layers of two sizes."""
    path = tmp_path_factory.mktemp("experts") / "experts.bin"
    return ExpertFile(path, [experts(*types) for types in TYPES])


def ids_of(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.sharded(9)
@all_pairs(tier=("generic", *VECTOR_TIERS), is_prefill=[False, True], name=list(distributions()))
def test_every_distribution_has_the_bits_of_experts_in_memory(
    expert_file: ExpertFile, tier: str, is_prefill: bool, name: str
) -> None:
    ids = distributions()[name]
    x = activations(1, len(ids), E)
    for num_slots, threads in ((1, 1), (2, 3), (NUM_EXPERTS, 2)):
        pool, runtime = expert_file.pool(num_slots), _csrc.Runtime(threads, tier)
        for layer in (0, 1, 2, 0):
            pool.begin_step(is_prefill)
            expected = run(runtime, x, ids, expert_file.layers[layer])
            assert same_bits(expert_file.run(runtime, pool, layer, x, ids), expected)
        assert len(owners(pool)) <= 2 * num_slots


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 16, 24, 64, 128])
def test_trap_4_all_in_memory_none_of_it_and_all_rows_on_one_expert(
    expert_file: ExpertFile, rows: int
) -> None:
    """Each twice: what the second step needs is in memory as far as there are slots."""
    runtime, x = _csrc.Runtime(2, FASTEST), activations(rows, rows, E)
    generator = torch.Generator().manual_seed(rows)
    batches = (
        torch.rand(rows, NUM_EXPERTS, generator=generator).argsort(dim=-1)[:, :3].int().contiguous(),
        torch.full((rows, 2), 4, dtype=torch.int32),
    )
    for ids in batches:
        expected = run(runtime, x, ids, expert_file.layers[0])
        for num_slots in (1, NUM_EXPERTS):
            pool = expert_file.pool(num_slots)
            for _ in range(2):
                pool.begin_step(False)
                assert same_bits(expert_file.run(runtime, pool, 0, x, ids), expected)


@pytest.mark.sharded
@EVERY_TIER
def test_experts_of_floats_and_of_several_types(tmp_path: Path, tier: str) -> None:
    runtime, ids = _csrc.Runtime(2, tier), distributions()["many tokens"]
    x = activations(2, len(ids), E)
    for number, types in enumerate(
        (
            (QuantType.F32, QuantType.BF16, QuantType.F16),
            (QuantType.MXFP4, QuantType.Q4_0, QuantType.IQ4_XS),
            (QuantType.Q8_0, QuantType.Q4_K, QuantType.Q5_0),
        )
    ):
        file = ExpertFile(tmp_path / str(number), [experts(*types)])
        pool = file.pool(2)
        assert same_bits(file.run(runtime, pool, 0, x, ids), run(runtime, x, ids, file.layers[0]))


def test_gate_and_up_may_be_rows_of_one_part(tmp_path: Path) -> None:
    gate, up, down = experts(QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)
    fused = QuantTensor(torch.cat((gate.blocks, up.blocks), dim=1), gate.quant_type, (NUM_EXPERTS, 2 * F, E))
    file = ExpertFile(tmp_path / "fused", [(fused, fused, down)])  # one of the two is not used
    pool, runtime, ids = file.pool(3), _csrc.Runtime(2), distributions()["many tokens"]
    x, out = activations(3, len(ids), E), torch.empty(*ids.shape, E)
    both, _, loaded_down = file.weights(pool, 0)
    _csrc.request_experts(runtime, pool, both, ids)
    _csrc.pooled_experts(runtime, pool, x, ids, both.rows(0, F), both.rows(F, 2 * F), loaded_down, out)
    assert same_bits(out, run(runtime, x, ids, (gate, up, down)))


@pytest.mark.sharded(6)
@EVERY_TIER
@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_trap_3_nan_in_slots_experts_and_rows_that_a_pair_does_not_use(
    tmp_path: Path, tier: str, num_slots: int
) -> None:
    """All other experts, rows and places hold NaN."""
    good, gone = experts(*TYPES[0]), NUM_EXPERTS - 1
    spoilt = [QuantTensor(stack.blocks.clone(), stack.quant_type, stack.shape) for stack in good]
    for stack in spoilt:
        stack.blocks[gone] = 255  # scales of NaN
    nothing = [
        QuantTensor(torch.full_like(stack.blocks, 255), stack.quant_type, stack.shape) for stack in good
    ]
    layers = [(stacks[0], stacks[1], stacks[2]) for stacks in (spoilt, nothing)]
    file, runtime = ExpertFile(tmp_path / "nan.bin", layers), _csrc.Runtime(2, tier)
    pool, ids = file.pool(num_slots), distributions()["many tokens"].clone()
    ids[::5] = -1
    x = activations(15, len(ids), E)
    x[::5] = torch.nan
    is_used = (ids >= 0) & (ids != gone)
    assert is_used.any(dim=-1).sum() > (ids == gone).sum() > 0
    expected = torch.full((*ids.shape, E), torch.nan)
    _csrc.routed_experts(runtime, x, ids.masked_fill(~is_used, -1), *map(load, good), expected)
    assert not expected[is_used].isnan().any()
    for is_prefill in (False, True, False):
        pool.begin_step(is_prefill)
        for layer in (1, 0, 1):
            out = torch.full((*ids.shape, E), torch.nan)
            out[ids < 0] = 7.0
            gate, up, down = file.weights(pool, layer)
            _csrc.request_experts(runtime, pool, gate, ids)
            _csrc.pooled_experts(runtime, pool, x, ids, gate, up, down, out)
            assert bool((out[ids < 0] == 7.0).all())
            assert layer == 1 or same_bits(out[is_used], expected[is_used])


@pytest.mark.sharded(of="kernels")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ex03_ex07_any_order_of_steps_gives_the_same_bits(
    expert_file: ExpertFile, data: st.DataObject
) -> None:
    """Steps of any kind, layers in turn, slots given away in any order: one owner a slot, and right bytes."""
    num_slots = data.draw(st.integers(1, NUM_EXPERTS), "slots")
    pool = expert_file.pool(num_slots, data.draw(st.integers(1, 4), "staging"))
    runtime = _csrc.Runtime(data.draw(st.integers(1, 3), "threads"), FASTEST)
    one_id = st.integers(-1, NUM_EXPERTS - 1)
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        rows = data.draw(st.integers(1, 5), "rows")
        x = activations(rows, rows, E)
        pool.begin_step(data.draw(st.booleans(), "prefill"))
        for layer in range(len(TYPES)):
            table = data.draw(st.lists(one_id, min_size=2 * rows, max_size=2 * rows), "ids")
            ids = torch.tensor(table, dtype=torch.int32).reshape(rows, 2)
            out = torch.full((rows, 2, E), 7.0)
            gate, up, down = expert_file.weights(pool, layer)
            _csrc.request_experts(runtime, pool, gate, ids)
            _csrc.pooled_experts(runtime, pool, x, ids, gate, up, down, out)
            expected = torch.full((rows, 2, E), 7.0)
            _csrc.routed_experts(runtime, x, ids, *map(load, expert_file.layers[layer]), expected)
            assert same_bits(out, expected)
        owners(pool)
        for size_class in range(2):
            order = data.draw(st.permutations(range(num_slots)), "order")
            pool.set_order(size_class, np.array(order, np.int64))


def test_a_step_of_decoding_keeps_what_it_used_and_takes_slots_in_order(expert_file: ExpertFile) -> None:
    pool, runtime, x = expert_file.pool(4), _csrc.Runtime(1), activations(4, 1, E)
    pool.begin_step(False)
    expert_file.run(runtime, pool, 1, x, ids_of((0, 1, 2, 3)))
    assert list(pool.used()) == [NUM_EXPERTS + e for e in range(4)]
    size_class = pool.class_of(1)
    by_slot = list(pool.owners(size_class))
    pool.set_order(size_class, np.array([by_slot.index(NUM_EXPERTS + e) for e in (2, 0, 3, 1)], np.int64))
    pool.begin_step(False)
    expert_file.run(runtime, pool, 1, x, ids_of((0, 4)))  # 2 goes first
    assert set(pool.owners(size_class)) == {NUM_EXPERTS + e for e in (0, 1, 3, 4)}
    pool.begin_step(False)
    pool.set_order(size_class, np.array([by_slot.index(NUM_EXPERTS + e) for e in (0, 3, 1)], np.int64))
    expert_file.run(runtime, pool, 1, x, ids_of((0, 5)))  # which uses 0 itself
    assert set(pool.owners(size_class)) == {NUM_EXPERTS + e for e in (0, 1, 4, 5)}
    hits, misses, _, num_bytes, _ = pool.count()
    assert (hits, misses) == (2, 6)
    assert num_bytes >= 6 * sum(part[2] for part in expert_file.parts[1])


def test_ex02_a_step_may_need_more_than_there_are_slots(expert_file: ExpertFile) -> None:
    pool, runtime, x = expert_file.pool(1), _csrc.Runtime(2), activations(5, 1, E)
    ids = ids_of(tuple(range(NUM_EXPERTS)))
    pool.begin_step(False)
    for layer in range(3):
        actual = expert_file.run(runtime, pool, layer, x, ids)
        assert same_bits(actual, run(runtime, x, ids, expert_file.layers[layer]))
    assert len(owners(pool)) == 2


def test_ex05_prefill_takes_only_the_first_slots_in_the_order(expert_file: ExpertFile) -> None:
    pool, runtime = expert_file.pool(6, num_staging=2), _csrc.Runtime(2)
    pool.begin_step(False)
    for layer, chosen in ((0, (0, 1, 2)), (2, (3, 4, 5))):  # of one size
        expert_file.run(runtime, pool, layer, activations(6, 1, E), ids_of(chosen))
    size_class = pool.class_of(0)
    before = list(pool.owners(size_class))
    pool.set_order(size_class, np.arange(6)[::-1].copy())
    for _ in range(3):
        pool.begin_step(True)
        for layer in (0, 2):
            ids = distributions()["many tokens"]
            expert_file.run(runtime, pool, layer, activations(7, len(ids), E), ids)
    assert list(pool.owners(size_class))[:4] == before[:4]


def test_an_empty_pool_is_filled_by_prefill_layer_by_layer(expert_file: ExpertFile) -> None:
    pool, runtime = expert_file.pool(6, num_staging=1), _csrc.Runtime(2)
    pool.begin_step(True)
    ids = distributions()["many tokens"]
    for layer in (0, 2):
        expert_file.run(runtime, pool, layer, activations(8, len(ids), E), ids)
    found = [owner // NUM_EXPERTS for owner in owners(pool)]
    assert found.count(0) >= 2
    assert found.count(2) >= 3


def test_ex03_a_slot_in_use_by_prefill_is_not_given_away(expert_file: ExpertFile) -> None:
    """Also not if it was free when the order was set, and is named there."""
    pool, runtime = expert_file.pool(4, num_staging=3), _csrc.Runtime(2)
    ids = distributions()["many tokens"]
    x = activations(14, len(ids), E)
    for size_class in range(2):
        pool.set_order(size_class, np.arange(4))
    for _ in range(2):
        pool.begin_step(True)
        for layer in range(3):
            expected = run(runtime, x, ids, expert_file.layers[layer])
            assert same_bits(expert_file.run(runtime, pool, layer, x, ids), expected)
            owners(pool)


@pytest.mark.parametrize("bad", [-2, NUM_EXPERTS, 2**31 - 1, -(2**31)])
def test_hostile_ids_are_refused(expert_file: ExpertFile, bad: int) -> None:
    pool, runtime, x = expert_file.pool(2), _csrc.Runtime(2), activations(9, 1, E)
    pool.begin_step(False)
    with pytest.raises(ValueError, match="an expert id lies outside the experts"):
        expert_file.run(runtime, pool, 0, x, ids_of((0, bad)))
    assert not owners(pool)
    pool.begin_step(False)
    ids = ids_of((0, 1))
    assert same_bits(expert_file.run(runtime, pool, 0, x, ids), run(runtime, x, ids, expert_file.layers[0]))


def test_fl01_experts_beyond_the_end_of_the_file_are_an_error_until_they_are_back(tmp_path: Path) -> None:
    file = ExpertFile(tmp_path / "shrinking.bin", [experts(*TYPES[0])])
    pool, runtime, x = file.pool(3), _csrc.Runtime(2), activations(10, 1, E)
    content = file.path.read_bytes()
    first, last = ids_of((0, 1)), ids_of((1, NUM_EXPERTS - 1))
    pool.begin_step(False)
    file.run(runtime, pool, 0, x, first)
    os.truncate(file.path, file.parts[0][2][1] + file.parts[0][2][2] + 100)  # in the second expert's down
    for _ in range(2):
        pool.begin_step(False)
        with pytest.raises(ModelChangedError, match=r"shrinking\.bin changed while in use: byte \d+"):
            file.run(runtime, pool, 0, x, last)
        assert set(owners(pool)) <= {0, 1, NUM_EXPERTS - 1}
    pool.begin_step(False)
    assert same_bits(file.run(runtime, pool, 0, x, first), run(runtime, x, first, file.layers[0]))
    file.path.write_bytes(content)
    pool.begin_step(False)
    assert same_bits(file.run(runtime, pool, 0, x, last), run(runtime, x, last, file.layers[0]))


def test_fl02_a_file_that_lost_its_name_is_still_read(tmp_path: Path) -> None:
    file = ExpertFile(tmp_path / "gone.bin", [experts(*TYPES[0])])
    pool, runtime, x = file.pool(2), _csrc.Runtime(1), activations(11, 1, E)
    file.path.unlink()
    file.path.write_bytes(b"\xff" * 100_000)
    ids = ids_of((3, 5))
    assert same_bits(file.run(runtime, pool, 0, x, ids), run(runtime, x, ids, file.layers[0]))


def test_nothing_in_memory_counts_after_clear(tmp_path: Path) -> None:
    file = ExpertFile(tmp_path / "rewritten.bin", [experts(*TYPES[0])])
    pool, runtime, x, ids = file.pool(2), _csrc.Runtime(1), activations(12, 1, E), ids_of((3, 5))
    file.run(runtime, pool, 0, x, ids)
    other = ExpertFile(
        tmp_path / "other.bin",
        [tuple(random_weight(t, w.shape, 9) for t, w in zip(TYPES[0], file.layers[0], strict=True))],
    )  # type: ignore[list-item]
    with file.path.open("r+b") as stream:
        stream.write(other.path.read_bytes())
    pool.clear()
    assert not owners(pool)
    pool.begin_step(False)
    assert same_bits(file.run(runtime, pool, 0, x, ids), run(runtime, x, ids, other.layers[0]))


def test_a_graph_reads_what_its_rows_need(expert_file: ExpertFile) -> None:
    pool, runtime, ids = expert_file.pool(3), _csrc.Runtime(3), distributions()["many tokens"].clone()
    x, out = activations(13, len(ids), E), torch.empty(*ids.shape, E)
    gate, up, down = expert_file.weights(pool, 0)
    runtime.begin_capture(len(ids))
    _csrc.request_experts(runtime, pool, gate, ids)
    _csrc.pooled_experts(runtime, pool, x, ids, gate, up, down, out)
    graph = runtime.end_capture()
    for rows in (1, 9, len(ids), 1):
        out.fill_(torch.nan)
        pool.begin_step(rows > 1)
        graph.run(rows)
        assert set(pool.used()) == set(ids[:rows].flatten().tolist())
        assert same_bits(out[:rows], run(runtime, x[:rows], ids[:rows], expert_file.layers[0]))
        assert out[rows:].isnan().all()


def test_bad_arguments_are_named(expert_file: ExpertFile) -> None:
    runtime, pool, ids = _csrc.Runtime(1), expert_file.pool(), ids_of((0, 1))
    gate, up, down = expert_file.weights(pool, 0)
    x, out = torch.zeros(1, E), torch.zeros(1, 2, E)
    with pytest.raises(ValueError, match="no slots"):
        _csrc.request_experts(runtime, pool, gate, ids)
    for slots in ([1], [1, 0]):
        with pytest.raises(ValueError, match="slot"):
            pool.allocate(slots, 1)
    pool.allocate([1, 1], 1)
    with pytest.raises(ValueError, match="have been allocated"):
        pool.allocate([1, 1], 1)
    with pytest.raises(ValueError, match="may not be in memory"):
        _csrc.routed_experts(runtime, x, ids, gate, up, down, out)
    with pytest.raises(ValueError, match="may not be in memory"):
        _csrc.dequantize(runtime, down, torch.zeros(NUM_EXPERTS, E, F))
    with pytest.raises(ValueError, match="do not lie in this pool"):
        _csrc.request_experts(runtime, expert_file.pool(1), gate, ids)
    with pytest.raises(ValueError, match="different layers"):
        _csrc.pooled_experts(runtime, pool, x, ids, gate, up, expert_file.weights(pool, 1)[2], out)
    with pytest.raises(ValueError, match="matrices of"):
        _csrc.Weight.from_pool(pool, 0, 0, int(QuantType.Q4_K), F, E // 2)
    with pytest.raises(IndexError):
        _csrc.Weight.from_pool(pool, 0, 3, int(QuantType.Q4_K), F, E)
    with pytest.raises(ValueError, match="no slot of this size"):
        pool.set_order(0, np.array([1]))
    with pytest.raises(ValueError, match="needs parts"):
        _csrc.ExpertPool([(0, "x")], [[]], 1, 1)
    with pytest.raises(MemoryError):
        _csrc.ExpertPool([(0, "x")], [[(0, 0, 2**50)]], 1, 1).allocate([2**30], 1)
    with pytest.raises(ValueError, match="63 bits"):
        _csrc.ExpertPool([(0, "x")], [[(0, 2**62, 1)]], 1, 1)
    with pytest.raises(ValueError, match="file 1 of 1"):
        _csrc.ExpertPool([(0, "x")], [[(1, 0, 1)]], 1, 1)
    with pytest.raises(OSError, match="cannot read nothing"):
        _csrc.ExpertPool([(999_999, "nothing")], [[(0, 0, 1)]], 1, 1)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_reads_of_an_abandoned_step_spoil_no_later_one(tmp_path: Path, num_threads: int) -> None:
    """Neither those that have not begun nor those under way: their slots are other experts' by then."""
    file = ExpertFile(tmp_path / "abandoned.bin", [experts(*types) for types in TYPES], num_threads)
    pool, runtime = file.pool(NUM_EXPERTS), _csrc.Runtime(1)
    x, everything = activations(16, 1, E), ids_of(tuple(range(NUM_EXPERTS)))
    for turn in range(60):
        pool.begin_step(False)
        _csrc.request_experts(runtime, pool, file.weights(pool, 0)[0], everything)
        pool.clear()
        pool.begin_step(False)
        layer, ids = (0, 2)[turn % 2], ids_of((turn % NUM_EXPERTS, (turn + 1) % NUM_EXPERTS))
        assert same_bits(file.run(runtime, pool, layer, x, ids), run(runtime, x, ids, file.layers[layer]))


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_prompt_leaves_the_experts_of_most_rows_in_free_slots(
    expert_file: ExpertFile, is_reversed: bool
) -> None:
    """The others pass through a slot for staging."""
    pool, runtime = expert_file.pool(6, num_staging=1), _csrc.Runtime(1)
    order = range(NUM_EXPERTS)[:: -1 if is_reversed else 1]
    rows = [(expert,) for rank, expert in enumerate(order) for _ in range(rank + 1)]
    pool.begin_step(True)
    x = activations(17, len(rows), E)
    expert_file.run(runtime, pool, 0, x, ids_of(*rows))
    share = 6 // 2  # two layers have experts of this size
    assert set(order[-share:]) <= set(owners(pool))
