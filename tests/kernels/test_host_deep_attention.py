"""The GPU's attention over integers in contexts of up to 262,144 positions: the bits of the definition.

On the host a window is cheap at any depth, and a row without one takes a second for 50,000 positions. A GPU
is compared with the C++ kernels, which test_cpu_deep_attention.py holds to the definition.
"""

import os

import pytest
from attention_batches import LIMITS, WITH_WARPGROUPS, BatchCase, Part, check_launched, random_tree
from deep_attention import LARGEST_CONTEXT, fast_definition

from coldstream.kernels import _csrc
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits
from coldstream.kernels.ops import BLOCK_POSITIONS

SMALL_HEADS = (2, 1, 32)
GROUP_HEADS = (4, 1, 128)  # warpgroups take multiples of 128
# Heads, windows, and counts of rows around those at which another kernel takes over.
GPU_CASES = (
    ((16, 2, 128), (None, 300), (1, 2, 3, 8, 9, 28, 48, 64, 65, 2048)),
    ((4, 2, 64), (None, 1, 300), (1, 8, 9, 28, 32, 33, 64, 65, 2048)),
    ((16, 2, 256), (None,), (1, 64)),
)
TREE_ROWS = (1, 3, 9, 28, 64)


def chain(end: int, num_rows: int) -> Part:
    """The last positions before `end`."""
    return Part(end - num_rows, num_rows)


def tree(end: int, num_rows: int) -> Part:
    """A random draft tree, whose keys lie at the last places before `end`."""
    return random_tree(end - num_rows, num_rows, seed=5)


def case_of(part: Part, cache_name: str, heads: tuple[int, int, int], window: int | None) -> BatchCase:
    blocks = -(-(part.committed + part.num_rows) // BLOCK_POSITIONS)
    return BatchCase([part], cache_name, heads, window, 1, blocks * BLOCK_POSITIONS)


def check(case: BatchCase, limits: DeviceLimits = LIMITS) -> None:
    with fast_definition():
        expected = case.expected()
    check_launched(case, expected, limits)


@pytest.mark.sharded
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
def test_windows_of_the_deepest_rows_have_the_bits_of_the_definition(cache_name: str) -> None:
    """Of one row, of several that share keys, and of so many that their chunks are merged immediately."""
    for part, window in (
        *((chain(LARGEST_CONTEXT, count), 300) for count in (1, 9, 65)),
        *((tree(LARGEST_CONTEXT, count), 300) for count in (9, 33)),
        (chain(LARGEST_CONTEXT, 9), 1),
        (tree(LARGEST_CONTEXT, 9), 1),
    ):
        check(case_of(part, cache_name, SMALL_HEADS, window))


@pytest.mark.sharded
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", ["i16", "i8"])
def test_windows_of_warpgroups_have_the_bits_of_the_definition(cache_name: str) -> None:
    for num_rows, window in ((9, 300), (17, 1), (65, 300)):
        check(case_of(chain(LARGEST_CONTEXT, num_rows), cache_name, GROUP_HEADS, window), WITH_WARPGROUPS)


@pytest.mark.sharded
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
def test_deep_rows_have_the_bits_of_the_definition(cache_name: str) -> None:
    for part in (chain(32_768, 1), chain(8194, 9), chain(2050, 65), tree(8194, 9)):
        check(case_of(part, cache_name, SMALL_HEADS, None))


@pytest.mark.usefixtures("host")
def test_the_deepest_row_has_the_bits_of_the_definition() -> None:
    """Whose 1,024 chunks are merged."""
    check(case_of(chain(LARGEST_CONTEXT, 1), "i16", SMALL_HEADS, None))


def check_gpu(case: BatchCase) -> None:
    runtime = _csrc.Runtime(min(16, os.cpu_count() or 1))
    check_launched(case, case.on_cpu(runtime), device_limits(), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize(
    ("heads", "windows", "num_rows"),
    [(heads, windows, count) for heads, windows, counts in GPU_CASES for count in counts],
)
def test_a_gpu_has_the_bits_of_cpus_at_262_thousand_positions(
    cache_name: str, heads: tuple[int, int, int], windows: tuple[int | None, ...], num_rows: int
) -> None:
    for window in windows:
        check_gpu(case_of(chain(LARGEST_CONTEXT, num_rows), cache_name, heads, window))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(16, 2, 128), (4, 2, 64)])
@pytest.mark.parametrize("num_rows", TREE_ROWS)
def test_a_gpu_has_the_bits_of_cpus_for_trees_at_262_thousand_positions(
    cache_name: str, heads: tuple[int, int, int], num_rows: int
) -> None:
    for window in (None, 1, 300):
        check_gpu(case_of(tree(LARGEST_CONTEXT, num_rows), cache_name, heads, window))
