"""The FFNs of experts for up to 32 tokens, an expert's pairs together, in CUDA C++: two launches.

`experts_gemv_cuda` computes the same pair by pair.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits
from coldstream.kernels.cuda.program import Argument, CudaProgram
from coldstream.kernels.cuda.skinny_shapes import (
    SLACK_BYTES,
    WARP_SIZE,
    MatrixShape,
    instance_for,
    plan_ring,
    row_group_bytes,
)
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.cuda import (
    WARPS,
    Down,
    ExpertMatrices,
    PairRows,
    check_experts,
    gate_up_of,
    matrix_of,
)
from coldstream.kernels.linear.integer_types import BLOCK_TYPES, INTEGER_TYPES

MAX_GROUPED_ROWS = 32
MAX_ITEM_ROWS = 8
ITEM_ROWS = 4  # pairs of an expert that a block takes together
FIRST_BITS = 12  # of an item's first pair
GATE_UP, DOWN = "coldstream::grouped_gate_up", "coldstream::grouped_down"
PROGRAM = CudaProgram(
    Path(__file__).with_name("grouped.cu"),
    tuple(instance_for(name, {kind}) for name in (GATE_UP, DOWN) for kind in sorted(INTEGER_TYPES)),
    is_slow=True,
)


@declared_in("experts/group_rows.cuh")
class Chosen(ctypes.Structure):
    @property
    def num_pairs(self) -> int:
        """Pairs of a token and a rank."""
        return int(self.num_tokens) * int(self.num_ranks)


@declared_in("experts/grouped.cu")
class TokenRows(ctypes.Structure): ...


@declared_in("experts/group_rows.cuh")
class GroupedPlan(ctypes.Structure): ...


@dataclass(frozen=True)
class ChosenIds:
    """Which of `num_experts` a step's tokens chose: int32 ids [T, K], contiguous, none twice in a row."""

    ids: DeviceArray
    num_experts: int


def experts_grouped_cuda(
    weights: ExpertMatrices,
    chosen: ChosenIds,
    hidden: PairRows,
    outs: PairRows,
    *,
    activations: QuantActivations | None = None,
    x: DeviceArray | None = None,
    item_rows: int = ITEM_ROWS,
) -> None:
    """As `experts_gemv_cuda`, for T ≤ MAX_GROUPED_ROWS and weights of integer types.

    Pairs of an expert read it together, up to `item_rows` of them.
    """
    check_experts(weights, chosen.ids, hidden, outs, activations, x)
    tensors = (weights.gate, weights.up, weights.down, *(weights.shared or ()))
    fits = len(chosen.ids) <= MAX_GROUPED_ROWS and chosen.ids.numel() < 1 << FIRST_BITS
    if not fits or not INTEGER_TYPES.issuperset(each.quant_type for each in tensors):
        raise ValueError(f"{len(chosen.ids)} tokens of such experts are not computed by groups")
    launch_grouped_gate_up(weights, chosen, hidden, activations, x, item_rows)
    launch_grouped_down(weights, chosen, hidden, outs, item_rows)


def launch_grouped_gate_up(
    weights: ExpertMatrices,
    chosen: ChosenIds,
    hidden: PairRows,
    activations: QuantActivations | None,
    x: DeviceArray | None,
    item_rows: int = ITEM_ROWS,
) -> None:
    """The first launch of `experts_grouped_cuda`, without its checks."""
    gate_up = gate_up_of(weights)
    rows = TokenRows(groups=-(-weights.gate.cols // GROUP_SIZE))
    if activations is not None:
        rows.q, rows.scales = activations.q.data_ptr(), activations.scales.data_ptr()
        rows.sums = activations.sums.data_ptr()
    if x is not None:
        rows.values, rows.stride = x.data_ptr(), x.stride(0)
    shapes = [shape for matrix in gate_up.matrix for shape in matrix.shape]
    row_bytes = rows.groups * row_group_bytes((shape.type for shape in shapes), at_once=True, is_lone=False)
    launch = _Launch.of(GATE_UP, shapes, WARPS // 2, row_bytes, chosen, weights, item_rows)
    launch.run([gate_up, hidden.as_c(), _chosen(chosen, weights.gate.addresses), rows])


def launch_grouped_down(
    weights: ExpertMatrices,
    chosen: ChosenIds,
    hidden: PairRows,
    outs: PairRows,
    item_rows: int = ITEM_ROWS,
) -> None:
    """The second launch, right behind the first: it reads the ids before that kernel has ended."""
    down = Down(matrix_of(weights.down, weights.shared[2] if weights.shared else None))
    shapes = list(down.down.shape)
    groups = -(-max(shape.num_cols for shape in shapes) // GROUP_SIZE)
    row_bytes = groups * row_group_bytes((shape.type for shape in shapes), at_once=False, is_lone=False)
    launch = _Launch.of(DOWN, shapes, WARPS, row_bytes, chosen, weights, item_rows)
    launch.run([down, hidden.as_c(), outs.as_c(), _chosen(chosen, weights.down.addresses)])


def _chosen(chosen: ChosenIds, addresses: DeviceArray) -> Chosen:
    tokens, ranks = chosen.ids.shape
    return Chosen(
        ids=chosen.ids.data_ptr(),
        addresses=addresses.data_ptr(),
        num_tokens=tokens,
        num_ranks=ranks,
        num_experts=chosen.num_experts,
    )


@dataclass(frozen=True)
class _Launch:
    """A kernel, its blocks and their shared memory."""

    instance: str
    num_blocks: int
    shared_bytes: int
    plan: GroupedPlan

    @classmethod
    def of(
        cls,
        name: str,
        shapes: Sequence[MatrixShape],
        teams: int,
        row_bytes: int,
        chosen: ChosenIds,
        weights: ExpertMatrices,
        item_rows: int,
    ) -> "_Launch":
        """teams: of a block, which take units in turn; row_bytes: of a row of activations."""
        limits, (tokens, ranks) = device_limits(), chosen.ids.shape
        has_shared = weights.shared is not None
        types = [shape.type for shape in shapes]
        for rows in range(min(item_rows, tokens), 0, -1):
            plan, shared_bytes, blocks = plan_groups(limits, shapes, row_bytes, chosen, rows)
            if shared_bytes:
                break
        else:
            raise ValueError(f"activations of {row_bytes} bytes a row do not fit a block's shared memory")
        plan.has_shared = has_shared
        num_shared = -(-tokens // plan.item_rows) if has_shared else 0
        most_units = max(shape.num_units for shape in shapes) * (tokens * ranks + num_shared)
        most_blocks = limits.num_processors * blocks
        instance = instance_for(name, types, *(weights.unit if name == GATE_UP else ()))
        return cls(instance, min(most_blocks, -(-most_units // teams)), shared_bytes, plan)

    def run(self, args: Sequence[Argument]) -> None:
        """Queues it."""
        PROGRAM.kernel(self.instance).launch(
            (self.num_blocks, 1, 1),
            WARPS * WARP_SIZE,
            (*args, self.plan),
            shared_bytes=self.shared_bytes,
            overlap=True,
        )


def plan_groups(
    limits: DeviceLimits, shapes: Sequence[MatrixShape], row_bytes: int, chosen: ChosenIds, item_rows: int
) -> tuple[GroupedPlan, int, int]:
    """The places in a block's memory, its bytes, 0 if they do not fit, and the blocks of a processor."""
    num_pairs = chosen.ids.numel()
    stage_bytes = max(shape.stage_bytes for shape in shapes)
    has_passes = any(shape.num_passes > 1 for shape in shapes)
    unit_rows = max(int(shape.unit_rows) for shape in shapes)
    sizes = {
        "rows_at": item_rows * row_bytes + SLACK_BYTES,
        "accumulators_at": 4 * WARPS * item_rows * WARP_SIZE * has_passes,
        "sums_at": 4 * WARPS * 2 * item_rows * unit_rows,
        "members_at": 2 * num_pairs,
        "items_at": 2 * num_pairs,
    }
    others = sum(map(_aligned, sizes.values()))
    scratch = _aligned(4 * (chosen.num_experts + 3 * num_pairs))
    most = blocks_per_processor([shape.type for shape in shapes])
    ring = plan_ring(limits, WARPS * stage_bytes, others, most, least_bytes=scratch + others)
    plan = GroupedPlan(item_rows=item_rows, stage_bytes=stage_bytes, unit_rows=unit_rows)
    if ring is None:
        return plan, 0, 0
    plan.stages = ring.stages
    at = max(ring.stages * WARPS * stage_bytes, scratch)
    for name, size in sizes.items():
        setattr(plan, name, at)
        at += _aligned(size)
    return plan, at, ring.blocks_per_processor


def blocks_per_processor(types: Sequence[int]) -> int:
    """The most blocks on a processor, as in grouped.cu."""
    return 4 if {int(each) for each in BLOCK_TYPES}.isdisjoint(int(each) for each in types) else 3


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
