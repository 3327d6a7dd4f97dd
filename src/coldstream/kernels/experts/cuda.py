"""The FFNs of routed and shared experts for up to 64 tokens, pair by pair, in CUDA C++: two launches."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, QuantActivations
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits
from coldstream.kernels.cuda.program import Argument, CudaProgram
from coldstream.kernels.cuda.skinny_shapes import (
    GROUP_TYPES,
    INTEGER_PASS_COLS,
    MAX_PAIR_ROWS,
    SKINNY_TYPES,
    SLACK_BYTES,
    WARP_SIZE,
    MatrixShape,
    RingPlan,
    grid_bytes,
    instance_for,
    lone_pass_cols,
    matrix_shape,
    natural_spread,
    plan_ring,
    row_group_bytes,
)
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.cuda import has_aligned_rows
from coldstream.kernels.linear.integer_types import BLOCK_TYPES, INTEGER_TYPES
from coldstream.kernels.ops import SWIGLU, Activation, ExpertBiases
from coldstream.kernels.quant_tensor import QuantTensor

WARPS = 4
BLOCKS_PER_PROCESSOR = 4
# Every block quantises the row for weights in blocks of 32, so that fewer and larger blocks are faster.
LARGE_WARPS, LARGE_BLOCKS, LARGE_UNIT_ROWS = 8, 2, 16
LEAST_SHARE = 0.95  # of the processors that such blocks keep busy
GRID_ROOM = 16 << 10  # bytes for the copies of a grid, as in gemv.cuh
GATE_UP, DOWN = "coldstream::expert_gate_up", "coldstream::expert_down"
PROGRAM = CudaProgram(
    Path(__file__).with_name("gemv.cu"),
    tuple(instance_for(name, {kind}) for name in (GATE_UP, DOWN) for kind in sorted(SKINNY_TYPES)),
    is_slow=True,
)


@dataclass(frozen=True)
class ExpertMatrices:
    """The routed experts of a layer, and its shared expert if there is one.

    shared: gate [Fs, E], up [Fs, E], down [E, Fs]; types and Fs may differ from those of the routed experts.
    """

    gate: ExpertTable
    up: ExpertTable
    down: ExpertTable
    shared: tuple[QuantTensor, QuantTensor, QuantTensor] | None
    activation: Activation = SWIGLU
    biases: ExpertBiases | None = None  # that of down is only brought near, for the sum of the outputs

    @property
    def unit(self) -> tuple[int, ...]:
        """The gated unit as kernels of gate and up name it behind the types; SwiGLU needs no name."""
        return (self.activation.number,) if self.activation.number else ()

    def pairs_per_token(self, topk_ids: DeviceArray) -> int:
        """K, and one more for the shared expert."""
        return topk_ids.shape[1] + (self.shared is not None)


@declared_in("experts/gemv.cuh")
class ExpertMatrix(ctypes.Structure): ...


@declared_in("experts/gemv.cuh")
class GateUp(ctypes.Structure): ...


@declared_in("experts/gemv.cuh")
class Down(ctypes.Structure): ...


@declared_in("experts/gemv.cuh", "PairRows")
class PairRowsArgument(ctypes.Structure): ...


@dataclass(frozen=True)
class PairRows:
    """A row for every (token, rank) pair and, with a shared expert, one for every token."""

    routed: DeviceArray  # float32 [T, K, width], contiguous, on 16 bytes
    shared: DeviceArray | None  # float32 [T, shared width], likewise

    def as_c(self) -> PairRowsArgument:
        """The two addresses."""
        return PairRowsArgument(
            routed=self.routed.data_ptr(), shared=None if self.shared is None else self.shared.data_ptr()
        )

    def check(self, width: int, shared_width: int | None, tokens: int, ranks: int) -> None:
        """ValueError unless both have these shapes and are contiguous."""
        expected: list[tuple[DeviceArray, tuple[int, ...]]] = [(self.routed, (tokens, ranks, width))]
        if self.shared is not None and shared_width is not None:
            expected.append((self.shared, (tokens, shared_width)))
        fits = all(tuple(rows.shape) == shape and rows.is_contiguous() for rows, shape in expected)
        if (self.shared is None) != (shared_width is None) or not fits:
            raise ValueError(f"rows of {tokens} tokens, {ranks} ranks and {width} values do not fit")


def experts_gemv_cuda(
    weights: ExpertMatrices,
    topk_ids: DeviceArray,
    hidden: PairRows,
    outs: PairRows,
    *,
    activations: QuantActivations | None = None,
    x: DeviceArray | None = None,
) -> None:
    """down(silu(gate x) · up x) of each chosen expert, kept apart, and of the shared expert.

    T ≤ MAX_PAIR_ROWS.

    topk_ids int32 [T, K], contiguous, each an expert of the tables. Gates and ups in super-blocks need
    `activations`, the rows [T, E] quantised with a scale for each 256 (`quantize/cuda.py`); other types need
    the float32 x [T, E], for blocks of 32 or 64 with rows aligned to 16 bytes. Writes the workspace `hidden`
    [T, K, F] and [T, Fs], and the results `outs` [T, K, E] and [T, E], but no rows of pairs whose expert has
    address 0. ValueError for shapes that do not fit.
    """
    check_experts(weights, topk_ids, hidden, outs, activations, x)
    launch_gate_up(weights, topk_ids, hidden, activations, x)
    launch_down(weights, topk_ids, hidden, outs)


def launch_gate_up(
    weights: ExpertMatrices,
    topk_ids: DeviceArray,
    hidden: PairRows,
    activations: QuantActivations | None,
    x: DeviceArray | None,
) -> None:
    """The first launch of `experts_gemv_cuda`, without its checks."""
    gate_up = gate_up_of(weights, is_lone=True)
    shapes = [shape for matrix in gate_up.matrix for shape in matrix.shape]
    groups = -(-weights.gate.cols // GROUP_SIZE)
    ranks, pairs = topk_ids.shape[1], weights.pairs_per_token(topk_ids)
    inputs = [None] * 3 if activations is None else [activations.q, activations.scales, activations.sums]
    args = [
        gate_up,
        hidden.as_c(),
        topk_ids,
        ranks,
        pairs,
        *inputs,
        x,
        0 if x is None else x.stride(0),
        groups,
    ]
    row_bytes = groups * row_group_bytes((shape.type for shape in shapes), at_once=True, is_lone=True)
    _launch(GATE_UP, 2, shapes, row_bytes, topk_ids, pairs, args, weights.unit or (0,))


def launch_down(weights: ExpertMatrices, topk_ids: DeviceArray, hidden: PairRows, outs: PairRows) -> None:
    """The second launch, right behind the first: it reads the ids before that kernel has ended."""
    down = Down(matrix_of(weights.down, weights.shared[2] if weights.shared else None, is_lone=True))
    if weights.biases is not None:
        down.bias = weights.biases.down.data_ptr()
    groups = -(-max(shape.num_cols for shape in down.down.shape) // GROUP_SIZE)
    ranks, pairs = topk_ids.shape[1], weights.pairs_per_token(topk_ids)
    args: list[Argument] = [down, hidden.as_c(), outs.as_c(), topk_ids, ranks, pairs]
    row_bytes = groups * row_group_bytes(
        (shape.type for shape in down.down.shape), at_once=False, is_lone=True
    )
    _launch(DOWN, 1, list(down.down.shape), row_bytes, topk_ids, pairs, args)


def _launch(
    name: str,
    team_warps: int,
    shapes: Sequence[MatrixShape],
    row_bytes: int,
    topk_ids: DeviceArray,
    pairs_per_token: int,
    args: Sequence[Argument],
    unit: tuple[int, ...] = (),
) -> None:
    types = {int(shape.type) for shape in shapes}
    num_pairs = topk_ids.shape[0] * pairs_per_token
    warps, blocks, stage_bytes, plan = _share_out(device_limits(), shapes, row_bytes, num_pairs, team_warps)
    numbers = (*unit, warps) if warps != WARPS else unit if any(unit) else ()
    PROGRAM.kernel(instance_for(name, types, *numbers)).launch(
        (blocks, num_pairs, 1),
        warps * WARP_SIZE,
        (*args, blocks // num_pairs, stage_bytes, plan.stages),
        shared_bytes=plan.shared_bytes,
        overlap=True,
    )


def _share_out(
    limits: DeviceLimits, shapes: Sequence[MatrixShape], row_bytes: int, num_pairs: int, team_warps: int
) -> tuple[int, int, int, RingPlan]:
    """Warps of a block, blocks of a pair, bytes of a stage, and a block's shared memory."""
    stage_bytes = max(shape.stage_bytes for shape in shapes)
    others = grid_bytes((shape.type for shape in shapes), GRID_ROOM) + row_bytes + SLACK_BYTES
    num_units = max(shape.num_units for shape in shapes)
    blocks = limits.num_processors * LARGE_BLOCKS // num_pairs
    if (
        all(shape.type in BLOCK_TYPES and shape.unit_rows <= LARGE_UNIT_ROWS for shape in shapes)
        and blocks * num_pairs >= LEAST_SHARE * LARGE_BLOCKS * limits.num_processors
        and num_units >= blocks * (LARGE_WARPS // team_warps)
    ):
        plan = plan_ring(limits, LARGE_WARPS * stage_bytes, others, LARGE_BLOCKS)
        if plan is not None and plan.stages > 1 and plan.blocks_per_processor == LARGE_BLOCKS:
            return LARGE_WARPS, blocks, stage_bytes, plan
    plan = plan_ring(limits, WARPS * stage_bytes, others, BLOCKS_PER_PROCESSOR)
    if plan is None:
        raise ValueError(f"activations of {row_bytes} bytes a row do not fit a block's shared memory")
    # One unit per team of warps while the blocks fit the device together, then more.
    most = -(-num_units // (WARPS // team_warps))
    blocks = min(most, -(-limits.num_processors * plan.blocks_per_processor // num_pairs))
    return WARPS, blocks, stage_bytes, plan


def matrix_of(
    table: ExpertTable, shared: QuantTensor | None, spread: int | None = None, *, is_lone: bool = False
) -> ExpertMatrix:

    def shape_of(quant_type: QuantType, rows: int, cols: int) -> MatrixShape:
        pass_cols = lone_pass_cols(quant_type, cols) if is_lone else INTEGER_PASS_COLS
        return matrix_shape(quant_type, rows, cols, spread, pass_cols)

    routed_shape = shape_of(table.quant_type, table.rows, table.cols)
    if shared is None:
        return ExpertMatrix(
            addresses=table.addresses.data_ptr(), shared=None, shape=(routed_shape, routed_shape)
        )
    shared_shape = shape_of(shared.quant_type, *shared.shape)
    return ExpertMatrix(
        addresses=table.addresses.data_ptr(),
        shared=shared.blocks.data_ptr(),
        shape=(routed_shape, shared_shape),
    )


def gate_up_of(weights: ExpertMatrices, *, is_lone: bool = False) -> GateUp:
    """One spread for gate and up, as a warp takes the same rows of both, whatever their types."""
    types = {weights.gate.quant_type, weights.up.quant_type}
    types |= {tensor.quant_type for tensor in (weights.shared or ())[:2]}
    spread = min(natural_spread(quant_type, weights.gate.cols) for quant_type in types)
    gate, up, _ = weights.shared or (None, None, None)
    biases = weights.biases
    return GateUp(
        matrix=(
            matrix_of(weights.gate, gate, spread, is_lone=is_lone),
            matrix_of(weights.up, up, spread, is_lone=is_lone),
        ),
        gate_bias=None if biases is None else biases.gate.data_ptr(),
        up_bias=None if biases is None else biases.up.data_ptr(),
        limit=weights.activation.limit,
        num_experts=len(weights.gate.addresses),
    )


def check_biases(
    activation: Activation, biases: ExpertBiases | None, num_experts: int, ffn_size: int
) -> None:
    """ValueError unless there are none, or those of gate and up fit kernels of this activation."""
    if biases is None:
        return
    for bias in (biases.gate, biases.up):
        check_array("bias", bias, "float32")
        if tuple(bias.shape) != (num_experts, ffn_size):
            raise ValueError(f"biases {tuple(bias.shape)} of {num_experts} experts of {ffn_size} values")
    if activation.kind == "swiglu":
        raise ValueError("no kernel adds biases before SwiGLU")


def check_experts(
    weights: ExpertMatrices,
    topk_ids: DeviceArray,
    hidden: PairRows,
    outs: PairRows,
    activations: QuantActivations | None,
    x: DeviceArray | None,
) -> None:
    tokens, ranks = topk_ids.shape
    size, cols = weights.gate.rows, weights.gate.cols
    tables = (weights.up.rows, weights.up.cols, weights.down.rows, weights.down.cols)
    if tables != (size, cols, cols, size) or not 0 < tokens <= MAX_PAIR_ROWS:
        raise ValueError(f"experts of {tables} do not fit gates [{size}, {cols}] and {tokens} tokens")
    check_array("topk_ids", topk_ids, "int32")
    check_biases(weights.activation, weights.biases, len(weights.gate.addresses), size)
    hidden.check(size, weights.shared[0].shape[0] if weights.shared else None, tokens, ranks)
    outs.check(cols, cols if weights.shared else None, tokens, ranks)
    first = [(weights.gate.quant_type, weights.up.quant_type)]
    if weights.shared is not None:
        gate, up, down = weights.shared
        first.append((gate.quant_type, up.quant_type))
        if up.shape != gate.shape or gate.shape[1] != cols or down.shape != (cols, gate.shape[0]):
            raise ValueError(f"the shared expert's {gate.shape}, {up.shape}, {down.shape} do not fit")
    for gate_type, up_type in first:
        if (gate_type in INTEGER_TYPES) != (up_type in INTEGER_TYPES):
            raise ValueError(f"a gate of {gate_type.name} with an up of {up_type.name} is not one product")
        for quant_type in (gate_type, up_type):
            if (activations if quant_type in GROUP_TYPES else x) is None:
                raise ValueError(f"{quant_type.name} experts need activations of the other kind")
            if x is not None and quant_type in BLOCK_TYPES and not has_aligned_rows(x):
                raise ValueError(f"{quant_type.name} experts need rows of activations on 16 bytes")
