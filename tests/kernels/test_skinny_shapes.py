"""How much shared memory the blocks of GEMV and skinny kernels take."""

import pytest

pytest.importorskip("cuda.bindings")

from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.skinny_shapes import RESERVED_BYTES, STATIC_BYTES, plan_ring

MORE = STATIC_BYTES + RESERVED_BYTES  # that a block takes beside


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
