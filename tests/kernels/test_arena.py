"""Memory for a captured graph's activations: what is reused, and what is not."""

import numpy as np

from coldstream.kernels.arena import ALIGNMENT, Arena

BYTES = np.dtype(np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_arrays_are_aligned_apart_and_hold_what_is_written() -> None:
    arena = Arena()
    arrays = [arena.empty((size, 3), np.dtype(np.float32)) for size in (1, 5, 100, 0, 7)]
    for number, array in enumerate(arrays):
        assert address(array) % ALIGNMENT == 0
        array[...] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert arrays[3].shape == (0, 3)
    assert len({address(array) for array in arrays}) == len(arrays)


def test_memory_is_reused_once_no_view_of_an_array_is_alive() -> None:
    arena = Arena()
    first = arena.empty((256,), BYTES)
    view, where, taken = first[10:20], address(first), arena.num_bytes
    del first
    second = arena.empty((256,), BYTES)
    assert address(second) != where, "a view of it is alive"
    del view
    assert address(arena.empty((256,), BYTES)) == where
    assert arena.num_bytes == 2 * taken


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    arena = Arena()
    arrays = [arena.empty((size,), BYTES) for size in (4096, 256, 1024)]
    large, small, middle = map(address, arrays)
    del arrays
    kept = [arena.empty((size,), BYTES) for size in (300, 10, 2000)]
    assert [address(each) for each in kept] == [middle, small, large]
    assert arena.num_bytes == 4096 + 256 + 1024
    more = arena.empty((65,), BYTES)
    assert address(more) not in (large, small, middle)
    assert arena.num_bytes == 4096 + 256 + 1024 + 128
