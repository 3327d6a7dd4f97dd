"""Blocks, states and rows of trees that sequences hold, and the room that a step asks for before it."""

import pytest

from cache_shape import Shape
from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.cache import CacheSize
from coldstream.kvcache.sequence import Sequence
from coldstream.kvcache.sequence_cache import Demand, SequenceCache


def cache_of(num_blocks: int, num_states: int, num_tree_rows: int = 8) -> SequenceCache:
    size = CacheSize(num_blocks, num_states, num_tree_rows)
    return SequenceCache(Shape(), CpuOps(1), size, "f32")


def held(cache: SequenceCache) -> tuple[int, ...]:
    """Blocks, states and rows of trees."""
    return tuple(pool.num_blocks - pool.num_free for pool in (cache.blocks, cache.states, cache.tree_rows))


def reserve(cache: SequenceCache, *demands: Demand) -> None:
    """What a step does before it computes anything."""
    cache.check_room(demands)
    cache.reserve(demands)


def sequence_of(cache: SequenceCache, length: int) -> Sequence:
    sequence = cache.new()
    reserve(cache, Demand(sequence, length))
    cache.append(sequence, length)
    return sequence


@pytest.mark.parametrize("length", [1, BLOCK_POSITIONS - 1, BLOCK_POSITIONS, BLOCK_POSITIONS + 1])
def test_blocks_are_taken_up_to_the_last_row(length: int) -> None:
    cache = cache_of(4, 1)
    sequence = sequence_of(cache, length)
    assert held(cache) == (1 + (length > BLOCK_POSITIONS), 1, 0)
    reserve(cache, Demand(sequence, 1))
    assert held(cache) == (1 + (length >= BLOCK_POSITIONS), 1, 0)


@pytest.mark.parametrize(("path", "num_blocks"), [([0, 2], 1), ([], 1), ([0, 1, 3], 1), ([0, 1, 3, 4], 2)])
def test_a_commit_gives_back_what_its_path_does_not_need(path: list[int], num_blocks: int) -> None:
    cache = cache_of(4, 1)
    sequence = sequence_of(cache, BLOCK_POSITIONS - 3)
    reserve(cache, Demand(sequence, 5, (-1, 0, 0, 1, 3)))
    assert held(cache) == (2, 1, 5)
    cache.accept(sequence, path)
    cache.settle(sequence, len(path))
    assert held(cache) == (num_blocks, 1, 0)


def test_a_restored_sequence_gives_back_what_came_after_its_checkpoint() -> None:
    cache = cache_of(4, 3)
    sequence = sequence_of(cache, 10)
    checkpoint = cache.checkpoint(sequence)
    for count in (300, 300):
        reserve(cache, Demand(sequence, count))
        cache.append(sequence, count)
        cache.checkpoint(sequence)
    assert held(cache) == (3, 3, 0)
    cache.restore(sequence, checkpoint)
    assert held(cache) == (1, 1, 0)
    reserve(cache, Demand(sequence, 1))
    assert held(cache) == (1, 2, 0)


def test_a_cleared_sequence_holds_nothing() -> None:
    cache = cache_of(4, 2)
    sequence = sequence_of(cache, 300)
    cache.checkpoint(sequence)
    reserve(cache, Demand(sequence, 2))
    cache.append(sequence, 2)
    reserve(cache, Demand(sequence, 3, (-1, -1, 0)))
    assert held(cache) == (2, 2, 3)
    cache.clear(sequence)
    assert held(cache) == (0, 0, 0)
    cache.check(sequence)


@pytest.mark.parametrize("num_holders", [2, 3])
def test_the_last_of_several_holders_needs_no_copy(num_holders: int) -> None:
    cache = cache_of(num_holders, num_holders)
    first = sequence_of(cache, 10)
    holders = [first, *(cache.fork(first) for _ in range(num_holders - 1))]
    reserve(cache, *(Demand(each, 1) for each in holders))
    assert held(cache) == (num_holders, num_holders, 0)
    assert len({each.state for each in holders}) == len({each.blocks[0] for each in holders}) == num_holders


@pytest.mark.parametrize(("num_blocks", "num_states", "what"), [(2, 3, "blocks"), (3, 2, "states")])
def test_every_holder_but_the_last_needs_a_copy(num_blocks: int, num_states: int, what: str) -> None:
    cache = cache_of(num_blocks, num_states)
    first = sequence_of(cache, 10)
    holders = [first, cache.fork(first), cache.fork(first)]
    with pytest.raises(OutOfMemoryError, match=f"2 more .*{what}.* are needed and 1 of 2 are free"):
        reserve(cache, *(Demand(each, 1) for each in holders))
    assert held(cache) == (1, 1, 0)


def test_a_tree_needs_no_state_before_its_commit() -> None:
    """And none if its path is empty."""
    cache = cache_of(2, 1)
    fork = cache.fork(sequence_of(cache, 10))
    reserve(cache, Demand(fork, 2, (-1, 0)))
    assert held(cache) == (2, 1, 2)
    with pytest.raises(OutOfMemoryError, match="1 more recurrent states are needed"):
        cache.accept(fork, [0])
    cache.accept(fork, [])
    cache.settle(fork, 0)
    assert held(cache) == (2, 1, 0)
    assert fork.length == 10
