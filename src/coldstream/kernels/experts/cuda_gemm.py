"""The routed experts of many tokens on integer tensor cores: grouping, gate and up with SwiGLU, down."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import QuantActivations, padded_cols
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.gemm_tiles import (
    BLOCK_SIZE,
    IN_PLACE,
    ActivationsArgument,
    Tiling,
    fitting,
    least_tilings,
)
from coldstream.kernels.cuda.limits import MAX_OVERLAP_ROWS
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.linear.cuda_gemm import TILINGS as DENSE_TILINGS

GROUP_THREADS, PLAN_THREADS = 1024, 1024
BLOCK_TOKENS, BLOCK_EXPERTS = 128, 1024  # of `group_and_plan`, as in group.cu
MOST_BLOCK_PAIRS = 1 << 15
MAX_OVERLAP_PAIRS = 8 * MAX_OVERLAP_ROWS  # as `overlaps`, for rows of eight experts each

# For groups that seldom exceed the few tokens of a tile.
SMALL_TILINGS: Mapping[QuantType, Tiling] = {
    kind: Tiling(kind, 1, 2, 8, 1, 3, 2 if kind in IN_PLACE else 1) for kind in DENSE_TILINGS
}
# Large groups take the tiles of dense products. They do not always fill one, and then the scaled planes of
# Q4_K and Q5_K cost warpgroups more than they save.
LARGE_TILINGS: Mapping[QuantType, tuple[Tiling, ...]] = {
    quant_type: tilings[-1:] if quant_type in IN_PLACE else tilings
    for quant_type, tilings in DENSE_TILINGS.items()
}
SMALL_GROUP = 12  # pairs an expert, on average


@declared_in("experts/gemm.cu", "ExpertsJob<true>")  # of both instances
class ExpertsJob(ctypes.Structure): ...


@dataclass(frozen=True)
class ExpertTables:
    """Device addresses of the experts' matrices, 0 for experts to leave out: int64 [experts] each."""

    gate: DeviceArray
    up: DeviceArray
    down: DeviceArray


@dataclass(frozen=True)
class Groups:
    """P = T · K pairs in the order of their experts; the memory is the caller's.

    pairs, tokens: int32 [P], pair (token · K + rank) and token at each place; counts: int32 [experts, 2];
    tiles: int32 [max_tiles(P, experts) + 1, 4], the list that the products walk over.
    """

    pairs: DeviceArray
    tokens: DeviceArray
    counts: DeviceArray
    tiles: DeviceArray


def max_tiles(num_pairs: int, num_experts: int) -> int:
    """The most tiles that any routing of `num_pairs` pairs needs."""
    return num_pairs // min(tiling.tokens for tiling in ALL_TILINGS) + min(num_pairs, num_experts)


def instance(tiling: Tiling, gated: bool) -> str:
    return f"experts_gemm<{tiling.name}, {str(gated).lower()}>"


ALL_TILINGS = tuple(
    tiling
    for quant_type, small in SMALL_TILINGS.items()
    for tiling in dict.fromkeys((small, *LARGE_TILINGS[quant_type], *least_tilings(quant_type)))
)
PROGRAM = CudaProgram(
    Path(__file__).with_name("gemm.cu"),
    [instance(tiling, gated) for tiling in ALL_TILINGS for gated in (True, False)],
    is_slow=True,
)
GROUP_PROGRAM = CudaProgram(
    Path(__file__).with_name("group.cu"), ("group_pairs", "plan_tiles", "group_and_plan")
)


def choose_tilings(num_pairs: int, num_experts: int, *quant_types: QuantType) -> tuple[Tiling, ...]:
    """Tilings for products that share one list of tiles. KeyError for a type without one."""
    if num_pairs <= SMALL_GROUP * num_experts:
        return tuple(fitting((SMALL_TILINGS[quant_type],)) for quant_type in quant_types)
    return tuple(fitting(LARGE_TILINGS[quant_type]) for quant_type in quant_types)


def group_pairs(topk_ids: DeviceArray, num_experts: int, groups: Groups) -> None:
    """Write the pairs, tokens and counts of `groups` for int32 `topk_ids` [T, K]: one launch.

    Pairs of one expert are adjacent and in ascending order, experts ascend. Pairs whose id lies outside
    0 … experts − 1 belong to none.
    """
    num_pairs = topk_ids.numel()
    check_array("topk_ids", topk_ids, "int32")
    _check_room(num_pairs, num_experts, groups)
    GROUP_PROGRAM.kernel("group_pairs").launch(
        (num_experts, 1, 1),
        GROUP_THREADS,
        (topk_ids, num_pairs, topk_ids.shape[-1], groups.counts, groups.pairs, groups.tokens),
        overlap=num_pairs <= MAX_OVERLAP_PAIRS,
    )


@declared_in("experts/group.cu")
class TileTables(ctypes.Structure): ...


def fit_one_block(num_tokens: int, num_pairs: int, num_experts: int) -> bool:
    """Whether `group_and_plan` takes them."""
    return num_tokens <= BLOCK_TOKENS and num_experts <= BLOCK_EXPERTS and num_pairs < MOST_BLOCK_PAIRS


def group_and_plan(topk_ids: DeviceArray, tables: ExpertTables, groups: Groups, tile_tokens: int) -> None:
    """`group_pairs` and `plan_tiles` in one launch. They `fit_one_block`, and no row has an expert twice."""
    num_pairs, num_experts = topk_ids.numel(), len(tables.gate)
    check_array("topk_ids", topk_ids, "int32")
    if not fit_one_block(len(topk_ids), num_pairs, num_experts):
        raise ValueError(f"{len(topk_ids)} tokens and {num_experts} experts are too many for one block")
    _check_room(num_pairs, num_experts, groups)
    _check_tiles(num_pairs, num_experts, groups, tile_tokens)
    addresses = TileTables(gate=tables.gate.data_ptr(), up=tables.up.data_ptr(), down=tables.down.data_ptr())
    GROUP_PROGRAM.kernel("group_and_plan").launch(
        (1, 1, 1),
        GROUP_THREADS,
        (
            topk_ids,
            num_pairs,
            topk_ids.shape[-1],
            num_experts,
            tile_tokens,
            addresses,
            groups.counts,
            groups.pairs,
            groups.tokens,
            groups.tiles,
        ),
        overlap=True,
    )


def _check_room(num_pairs: int, num_experts: int, groups: Groups) -> None:
    if len(groups.pairs) < num_pairs or len(groups.tokens) < num_pairs or len(groups.counts) < num_experts:
        raise ValueError(f"the groups have no room for {num_pairs} pairs of {num_experts} experts")


def _check_tiles(num_pairs: int, num_experts: int, groups: Groups, tile_tokens: int) -> None:
    if len(groups.tiles) < 1 + num_pairs // tile_tokens + min(num_pairs, num_experts):
        raise ValueError(f"{len(groups.tiles)} tiles are too few for {num_pairs} pairs")


def plan_tiles(num_pairs: int, tables: ExpertTables, groups: Groups, tile_tokens: int) -> None:
    """Write the tiles of `groups`, whose `num_pairs` pairs are grouped: one launch.

    A tile has at most `tile_tokens` pairs, which must be no more than any tiling has that walks over the
    list. Pairs whose expert has an address 0 in any table are in no tile.
    """
    num_experts = len(tables.gate)
    _check_tiles(num_pairs, num_experts, groups, tile_tokens)
    GROUP_PROGRAM.kernel("plan_tiles").launch(
        (1, 1, 1),
        PLAN_THREADS,
        (groups.counts, num_experts, tile_tokens, tables.gate, tables.up, tables.down, groups.tiles),
        overlap=num_pairs <= MAX_OVERLAP_PAIRS,
    )


def experts_gate_up_gemm(
    x: QuantActivations,
    tables: ExpertTables,
    tiling: Tiling,
    ffn_size: int,
    hidden_size: int,
    groups: Groups,
    out: DeviceArray,
) -> None:
    """Write silu(gate · x) · (up · x) of the pairs in tiles to `out` float32 [P, F] by place: one launch.

    x has the T tokens; gate and up are [F, E] of the tiling's type. Rows of pairs in no tile are left alone.
    """
    job = gate_up_job(x, tables, tiling, ffn_size, hidden_size, groups, out)
    launch_experts(PROGRAM, tiling, True, job, groups)


def experts_product_gemm(
    x: QuantActivations,
    addresses: DeviceArray,
    tiling: Tiling,
    num_rows: int,
    num_values: int,
    groups: Groups,
    out: DeviceArray,
    *,
    by_token: bool,
) -> None:
    """One product with each expert's matrix [num_rows, num_values] of the tiling's type: one launch.

    By token: x has the T tokens, `out` float32 [P, num_rows] is written by place, for gate and up of two
    types. Otherwise x has a row per place and `out` is [T · K, num_rows] or [T, K, num_rows] by pair: down.
    """
    job = product_job(x, addresses, tiling, num_rows, num_values, groups, out, by_token=by_token)
    launch_experts(PROGRAM, tiling, False, job, groups)


def gate_up_job(
    x: QuantActivations,
    tables: ExpertTables,
    tiling: Tiling,
    ffn_size: int,
    hidden_size: int,
    groups: Groups,
    out: DeviceArray,
) -> ExpertsJob:
    """The arguments of `experts_gate_up_gemm` as the kernel takes them."""
    return _job(x, tables.gate, tables.up, tiling, ffn_size, hidden_size, groups, groups.tokens, None, out)


def product_job(
    x: QuantActivations,
    addresses: DeviceArray,
    tiling: Tiling,
    num_rows: int,
    num_values: int,
    groups: Groups,
    out: DeviceArray,
    *,
    by_token: bool,
) -> ExpertsJob:
    """The arguments of `experts_product_gemm` as the kernel takes them."""
    x_rows, out_rows = (groups.tokens, None) if by_token else (None, groups.pairs)
    return _job(x, addresses, None, tiling, num_rows, num_values, groups, x_rows, out_rows, out)


def _job(
    x: QuantActivations,
    addresses: DeviceArray,
    up_addresses: DeviceArray | None,
    tiling: Tiling,
    num_rows: int,
    num_values: int,
    groups: Groups,
    x_rows: DeviceArray | None,
    out_rows: DeviceArray | None,
    out: DeviceArray,
) -> ExpertsJob:
    check_array("out", out, "float32")
    if out.shape[-1] != num_rows:
        raise ValueError(f"the output must be [..., {num_rows}], not {tuple(out.shape)}")
    if x.q.shape[-1] != padded_cols(num_values):
        raise ValueError(f"activations of {x.q.shape[-1]} codes do not fit {num_values} values")
    return ExpertsJob(
        x=ActivationsArgument.of(x, tiling.quant_type),
        addresses=addresses.data_ptr(),
        up_addresses=None if up_addresses is None else up_addresses.data_ptr(),
        tiles=groups.tiles.data_ptr(),
        x_rows=None if x_rows is None else x_rows.data_ptr(),
        out_rows=None if out_rows is None else out_rows.data_ptr(),
        out=out.data_ptr(),
        num_rows=num_rows,
        num_blocks=num_values // BLOCK_SIZE,
        row_bytes=tiling.quant_type.row_bytes(num_values),
        out_stride=num_rows,
    )


def launch_experts(
    program: CudaProgram, tiling: Tiling, gated: bool, job: ExpertsJob, groups: Groups
) -> None:
    """Queue one of the two products with the given tiling."""
    tile_rows = tiling.rows // 2 if gated else tiling.rows
    num_tiles = -(-job.num_rows // tile_rows) * (len(groups.tiles) - 1)
    program.kernel(instance(tiling, gated)).launch(
        tiling.grid(num_tiles),
        tiling.threads,
        (job,),
        shared_bytes=tiling.shared_bytes,
        overlap=len(groups.pairs) <= MAX_OVERLAP_PAIRS,
    )
