"""The launches of a layer's experts, in memory that the caller allocates."""

from collections.abc import Collection, Sequence

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import QuantActivations
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.gemm_tiles import Tiling
from coldstream.kernels.experts import cuda as experts_gemv
from coldstream.kernels.experts import cuda_gemm as experts_gemm
from coldstream.kernels.experts import cuda_grouped as experts_grouped
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.ops import ExpertWeights

Stacks = tuple[ExpertTable, ExpertTable, ExpertTable]


def stacks_of(weights: ExpertWeights) -> Stacks:
    """Gate, up and down of the routed experts."""
    return weights.gate, weights.up, weights.down


def is_one_launch(weights: ExpertWeights, readable: Collection[QuantType]) -> bool:
    """Whether a launch that reads these types can have the shared expert too; False without a shared one."""
    if weights.shared_gate is None:
        return False
    types = [w.quant_type for w in (weights.shared_gate, weights.shared_up, weights.shared_down)]
    are_alike = (types[0] in INTEGER_TYPES) == (types[1] in INTEGER_TYPES)
    return are_alike and all(quant_type in readable for quant_type in types)


def all_experts_gemv(
    x: Activations,
    ids: DeviceArray,
    weights: ExpertWeights,
    hidden: experts_gemv.PairRows,
    outs: experts_gemv.PairRows,
) -> None:
    """`experts_gemv_cuda` with a layer's weights; the shared expert only if `outs.shared` is given."""
    matrices = _matrices(weights, has_shared=outs.shared is not None)
    experts_gemv.experts_gemv_cuda(matrices, ids, hidden, outs, activations=x.quantised, x=x.values)


def all_experts_grouped(
    x: Activations,
    chosen: experts_grouped.ChosenIds,
    weights: ExpertWeights,
    hidden: experts_gemv.PairRows,
    outs: experts_gemv.PairRows,
) -> None:
    """`all_experts_gemv` with `experts_grouped_cuda`."""
    matrices = _matrices(weights, has_shared=outs.shared is not None)
    experts_grouped.experts_grouped_cuda(matrices, chosen, hidden, outs, activations=x.quantised, x=x.values)


def _matrices(weights: ExpertWeights, *, has_shared: bool) -> experts_gemv.ExpertMatrices:
    shared = (weights.shared_gate, weights.shared_up, weights.shared_down) if has_shared else None
    stacks = weights.gate, weights.up, weights.down
    return experts_gemv.ExpertMatrices(*stacks, shared, weights.activation, weights.biases)


def gate_up_gemm(
    x: Sequence[QuantActivations],
    ids: DeviceArray,
    stacks: Stacks,
    groups: experts_gemm.Groups,
    outs: Sequence[DeviceArray],
) -> None:
    """Gate and up of the routed experts that have addresses, of integer types.

    x: activations quantised for gate and for up. The pairs of `groups` must be grouped, unless they
    `fit_one_block`. Writes the tiles of `groups`, and to outs float32 [T · K, F] by place: both products, or
    with one of them the SwiGLU of gate and up, which are of one type.
    """
    gate, up, down = stacks
    ffn_size, hidden_size = gate.rows, gate.cols
    tables = experts_gemm.ExpertTables(gate.addresses, up.addresses, down.addresses)
    first, second, _ = _tilings(ids.numel(), stacks)
    most_tokens = tile_tokens(ids.numel(), stacks)
    if experts_gemm.fit_one_block(len(ids), ids.numel(), len(gate.addresses)):
        experts_gemm.group_and_plan(ids, tables, groups, most_tokens)
    else:
        experts_gemm.plan_tiles(ids.numel(), tables, groups, most_tokens)
    if len(outs) == 1:
        experts_gemm.experts_gate_up_gemm(x[0], tables, first, ffn_size, hidden_size, groups, outs[0])
        return
    for rows, stack, tiling, out in zip(x, (gate, up), (first, second), outs, strict=True):
        experts_gemm.experts_product_gemm(
            rows, stack.addresses, tiling, ffn_size, hidden_size, groups, out, by_token=True
        )


def down_gemm(
    hidden: QuantActivations,
    ids: DeviceArray,
    stacks: Stacks,
    groups: experts_gemm.Groups,
    routed: DeviceArray,
) -> None:
    """The down products of the tiles of `groups`: hidden [T · K, F] by place → float32 `routed` [T, K, E]."""
    tiling, down = _tilings(ids.numel(), stacks)[-1], stacks[-1]
    experts_gemm.experts_product_gemm(
        hidden, down.addresses, tiling, down.rows, down.cols, groups, routed, by_token=False
    )


def tile_tokens(num_pairs: int, stacks: Stacks) -> int:
    """The pairs of an expert that GEMM kernels take together."""
    return min(tiling.tokens for tiling in _tilings(num_pairs, stacks))


def _tilings(num_pairs: int, stacks: Sequence[ExpertTable]) -> tuple[Tiling, ...]:
    types = [stack.quant_type for stack in stacks]
    return experts_gemm.choose_tilings(num_pairs, len(stacks[0].addresses), *types)
