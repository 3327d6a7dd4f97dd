"""Experts that a pool is given before the first step, and layers whose experts stay in it."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_cases import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import ExpertFile, owners
from random_blocks import activations
from test_cpu_experts import NUM_EXPERTS, E, distributions, experts, run

from coldstream.errors import ModelChangedError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc

TYPES = (
    (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K),
    (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q4_K),
    (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K),
)


@pytest.fixture(scope="module")
def expert_file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    """Three layers, the outer ones of one size."""
    path = tmp_path_factory.mktemp("experts") / "experts.bin"
    return ExpertFile(path, [experts(*types) for types in TYPES])


def test_what_was_loaded_is_found_by_the_first_step(expert_file: ExpertFile) -> None:
    pool, runtime, x = expert_file.pool(4), _csrc.Runtime(2), activations(1, 1, E)
    pool.preload(0, [5, 2])
    pool.preload(1, [0])
    pool.preload(0, [2, 4])  # one of them is there
    assert set(owners(pool)) == {5, 2, 4, NUM_EXPERTS}
    assert pool.count()[:2] == (0, 0)
    pool.begin_step(False)
    ids = torch.tensor([[4, 5, 2]], dtype=torch.int32)
    assert same_bits(expert_file.run(runtime, pool, 0, x, ids), run(runtime, x, ids, expert_file.layers[0]))
    assert pool.count()[:2] == (3, 0)


def test_what_cannot_be_loaded_is_named(expert_file: ExpertFile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no slots: call allocate first"):
        expert_file.pool().preload(0, [1])
    pool = expert_file.pool(2)
    for bad in (-1, NUM_EXPERTS):
        with pytest.raises(ValueError, match="outside the experts of the layer"):
            pool.preload(0, [0, bad])
    for call in (lambda: pool.preload(3, [0]), lambda: pool.keep(3), lambda: pool.keep(-1)):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match="no free slot left"):
        pool.preload(0, [0, 1, 2])
    pool.begin_step(False)
    pool.preload(1, [3])
    assert NUM_EXPERTS + 3 in owners(pool)
    short = ExpertFile(tmp_path / "short.bin", expert_file.layers)
    os.truncate(short.path, short.parts[2][0][1])
    pool = short.pool(4)
    pool.preload(0, [1])
    with pytest.raises(ModelChangedError, match=r"short\.bin"):
        pool.preload(2, [1])
    pool.begin_step(False)
    assert set(owners(pool)) == {1}


@pytest.mark.sharded(of="kernels")
@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_others=st.integers(1, 6), threads=st.integers(1, 3))
def test_no_step_takes_a_slot_from_a_kept_layer(
    expert_file: ExpertFile, data: st.DataObject, num_others: int, threads: int
) -> None:
    """Decoding or a prompt, in any order of slots; and again after all was forgotten."""
    pool, runtime = expert_file.pool(NUM_EXPERTS + num_others), _csrc.Runtime(threads)
    kept = set(range(NUM_EXPERTS))
    pool.preload(0, list(range(NUM_EXPERTS)))
    pool.keep(0)
    size_class = pool.class_of(0)

    def check_steps() -> None:
        for _ in range(data.draw(st.integers(1, 5), "steps")):
            is_prefill = data.draw(st.booleans(), "is prefill")
            order = data.draw(st.permutations(range(NUM_EXPERTS + num_others)), "order")
            pool.set_order(size_class, np.array(order, np.int64))
            pool.begin_step(is_prefill)
            for layer in range(3):
                ids = distributions()[data.draw(st.sampled_from(sorted(distributions())), "ids")]
                x = activations(layer, len(ids), E)
                expected = run(runtime, x, ids, expert_file.layers[layer])
                assert same_bits(expert_file.run(runtime, pool, layer, x, ids), expected)

    check_steps()
    assert kept <= set(owners(pool))
    pool.clear()
    check_steps()
    pool.begin_step(False)
    ids = torch.arange(NUM_EXPERTS, dtype=torch.int32)[None]
    expert_file.run(runtime, pool, 0, activations(0, 1, E), ids)
    check_steps()
    assert kept <= set(owners(pool))
