"""How much shared memory the blocks of GEMV and skinny kernels take."""

import re

import pytest

pytest.importorskip("cuda.bindings")

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.compiler import KERNELS
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.skinny_shapes import (
    BANK_BYTES,
    GRID_ENTRIES,
    INTEGER_PASS_COLS,
    REPEATED_GRIDS,
    ROW_SHIFT,
    ROW_SHIFTS,
    STATIC_BYTES,
    matrix_shape,
    plan_ring,
)
from coldstream.kernels.linear.integer_types import INTEGER_TYPES

MORE = STATIC_BYTES + 1024  # that a block takes beside


@pytest.mark.parametrize("per_processor", [100_000, 200_000, 230_000])
def test_two_stages_unless_one_lets_more_blocks_run(per_processor: int) -> None:
    limits = DeviceLimits(132, 100_000, per_processor)
    for stage_bytes in range(1000, 60_000, 777):
        fitting = {n: per_processor // (n * stage_bytes + 500 + MORE) for n in (1, 2)}
        fitting = {n: min(2, count) for n, count in fitting.items()}
        fitting[2] *= 2 * stage_bytes + 500 + STATIC_BYTES <= 100_000
        plan = plan_ring(limits, stage_bytes, 500, 2)
        assert plan is not None
        assert plan.stages == (1 if fitting[1] > fitting[2] else 2)
        assert plan.shared_bytes == plan.stages * stage_bytes + 500
        assert plan.blocks_per_processor == fitting[plan.stages] > 0


def test_a_block_may_take_all_that_is_left_beside_what_it_declares() -> None:
    limits = DeviceLimits(132, 10_000, 100_000)
    most = 10_000 - STATIC_BYTES
    fits, too_large = (plan_ring(limits, size, 0, 1) for size in (most, most + 1))
    assert (fits and (fits.stages, fits.shared_bytes)) == (1, most)
    assert too_large is None
    least = plan_ring(limits, 10, 0, 1, least_bytes=most)
    assert (least and (least.stages, least.shared_bytes)) == (2, most)


def test_grids_have_the_sizes_that_device_code_sees() -> None:
    text = (KERNELS / "cuda/weight_traits.cuh").read_text()
    structs = {part.split(" ", 1)[0]: part for part in text.split("\nstruct ")}
    found = {name: re.search(r"grid_entries = (\d+);", part) for name, part in structs.items()}
    assert {name: int(match[1]) for name, match in found.items() if match} == {
        kind.name: entries for kind, entries in GRID_ENTRIES.items()
    }
    repeated = {name for name, part in structs.items() if "repeats_grid = true" in part}
    assert repeated == {kind.name for kind in REPEATED_GRIDS}


@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
@pytest.mark.parametrize("cols", [INTEGER_PASS_COLS, INTEGER_PASS_COLS + 256, 3 * INTEGER_PASS_COLS])
def test_rows_of_a_ring_begin_where_lanes_read_different_banks(quant_type: QuantType, cols: int) -> None:
    shape = matrix_shape(quant_type, 100, cols)
    assert shape.stage_stride % BANK_BYTES == ROW_SHIFTS.get(quant_type, ROW_SHIFT)
