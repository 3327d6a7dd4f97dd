"""What a draft block computes between its products, in CUDA C++ over float32 rows.

Keys and values are kept as bfloat16. Contexts are committed rows of one sequence by layer: `CONTEXT_TYPE`
entries in the device's memory. Each names keys and values, bfloat16 [capacity, kv heads, head_dim], and int32
positions [capacity]. The row at position p lies at p modulo the capacity, with p in `positions`; a negative
number there says that none does.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.draft_block import HEAD_SIZES, MAX_CANDIDATES

WARPS = (8, 4)  # of a block of threads that attend: the first with which it has the shared memory
WARP_QUERIES = 4
THREADS, WARP_SIZE = 256, 32  # of a block of other threads
PLACE, PLACE_COMMITTED = "place_draft_rows<{}>", "place_committed_rows<{}>"  # whether there are biases
ROWS = CudaProgram(
    Path(__file__).with_name("rows.cu"),
    (  # Instances with biases are compiled for a drafter that has them.
        *("draft_convolve", PLACE.format("false"), PLACE_COMMITTED.format("false")),
        *("score_draft_pairs", "choose_draft_chain", "forget_draft_rows", "norm_draft_features"),
    ),
)
ATTEND, MERGE = "attend_draft<{}, {}>", "merge_draft<{}>"
ATTENTION = CudaProgram(
    Path(__file__).with_name("attend.cu"),
    (
        *(ATTEND.format(size, warps) for size in HEAD_SIZES for warps in WARPS),
        *(MERGE.format(size) for size in HEAD_SIZES),
    ),
)
NO_ROW: Final = 2**32 - 1  # bits of the int32 −1, a position that no row has
MAX_SPLITS: Final = 64  # of the positions, for blocks of threads that work side by side


@declared_in("draft_block/values.cuh")
class DraftContext(ctypes.Structure):
    """A layer's rows, as in `CONTEXT_TYPE`."""


CONTEXT_TYPE: Final = np.dtype(DraftContext)


@declared_in("draft_block/rows.cu")
class DraftConvolution(ctypes.Structure): ...


@declared_in("draft_block/rows.cu")
class DraftRope(ctypes.Structure): ...


@declared_in("draft_block/rows.cu")
class DraftHeads(ctypes.Structure): ...


@declared_in("draft_block/rows.cu")
class PlacedDraftRows(ctypes.Structure): ...


@declared_in("draft_block/rows.cu")
class CommittedDraftRows(ctypes.Structure): ...


MAX_COMMITTED_LAYERS: Final = len(CommittedDraftRows().at)  # of a launch


@declared_in("draft_block/rows.cu")
class DraftPairs(ctypes.Structure): ...


@declared_in("draft_block/attend.cu")
class DraftAttention(ctypes.Structure): ...


@dataclass(frozen=True)
class HeadShape:
    """The heads of all layers and how they are rotated."""

    num_heads: int
    num_kv_heads: int
    dim: int  # one of HEAD_SIZES
    eps: float
    turns: DeviceArray  # float64 [dim / 2] on the device: of a position, in whole turns
    magnitude: float  # of cosines and sines

    @property
    def query_dim(self) -> int:
        """Of all query heads."""
        return self.num_heads * self.dim

    @property
    def kv_dim(self) -> int:
        """Of all key heads, and of all value heads."""
        return self.num_kv_heads * self.dim

    def argument(self) -> DraftHeads:
        """As kernels take it."""
        return DraftHeads(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            dim=self.dim,
            eps=self.eps,
            rope=DraftRope(turns=self.turns.data_ptr(), magnitude=self.magnitude),
        )


@dataclass(frozen=True)
class DraftRows:
    """Rows of a block between the products of a layer and its attention.

    queries: float32 [B, query_dim]; kv: bfloat16 [B, 2 · kv_dim], keys and then values.
    """

    queries: DeviceArray
    kv: DeviceArray

    def fits(self, shape: HeadShape) -> bool:
        """Whether these are rows of such heads."""
        rows = len(self.queries)
        return self.queries.shape == (rows, shape.query_dim) and self.kv.shape == (rows, 2 * shape.kv_dim)


@dataclass(frozen=True)
class CommittedRowsOfLayer:
    """float32 keys and values [n, kv_dim] of committed rows, and the weight [dim] of the norm of keys.

    biases: of keys and values, float32 [kv_dim] both; None in all layers of a launch, or in none.
    """

    keys: DeviceArray
    values: DeviceArray
    key_weight: DeviceArray
    biases: tuple[DeviceArray, DeviceArray] | None = None


@dataclass(frozen=True)
class LayerView:
    """What rows of a layer see; see `DflashLayer`."""

    layer: int
    window: int | None
    is_causal: bool


def convolve_cuda(x: DeviceArray, base: DeviceArray, dynamic: DeviceArray, out: DeviceArray) -> None:
    """`reference.convolve` of float32 x [B, E] into `out` [B, E], which is not x.

    base: [kernel, E]; dynamic: [B, kernel, groups], whose rows may be apart. ValueError if shapes disagree.
    """
    (rows, cols), (kernel, groups) = x.shape, dynamic.shape[1:]
    is_fitting = base.shape == (kernel, cols) and len(dynamic) == rows and cols % groups == 0
    if not is_fitting or out.shape != x.shape:
        raise ValueError(f"rows {tuple(x.shape)}, weights {tuple(base.shape)} and {tuple(dynamic.shape)}")
    weights = DraftConvolution(
        base=base.data_ptr(),
        dynamic=dynamic.data_ptr(),
        kernel=kernel,
        group=cols // groups,
        dynamic_stride=dynamic.stride(0),
    )
    grid = (-(-cols // THREADS), rows, 1)
    ROWS.kernel("draft_convolve").launch(grid, THREADS, (x, weights, out, cols), overlap=True)


def norm_features_cuda(features: DeviceArray, weights: DeviceArray, eps: float, out: DeviceArray) -> None:
    """`reference.norm_features` of bfloat16 features [n, layers · E] into float32 `out`, of their shape.

    weights: float32 [layers, E]. All are contiguous. ValueError if shapes disagree.
    """
    (rows, width), (layers, cols) = features.shape, weights.shape
    if width != layers * cols or out.shape != features.shape:
        raise ValueError(
            f"features {tuple(features.shape)} by {tuple(weights.shape)} into {tuple(out.shape)}"
        )
    if not all(each.is_contiguous() for each in (features, weights, out)):
        raise ValueError("features, their weights and their norms must be contiguous")
    args = (features, weights, eps, out, cols)
    ROWS.kernel("norm_draft_features").launch((layers, rows, 1), THREADS, args, overlap=True)


def place_draft_rows_cuda(
    rows: DraftRows,
    keys: DeviceArray,
    values: DeviceArray,
    shape: HeadShape,
    weights: tuple[DeviceArray, DeviceArray],
    length: DeviceArray,
    biases: tuple[DeviceArray, DeviceArray, DeviceArray] | None = None,
) -> None:
    """Norms and rotates queries in place, and keys; writes keys and values into `rows.kv`.

    keys, values: float32 [B, kv_dim]. weights: float32 [dim], of the norms of queries and keys. length: int32
    [1] on the device, the position of the first row. biases: float32, added before to queries [query_dim],
    keys and values [kv_dim]. ValueError if shapes disagree.
    """
    kv_shape = (len(rows.queries), shape.kv_dim)
    if not rows.fits(shape) or keys.shape != kv_shape or values.shape != kv_shape:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} of heads of {shape.dim}")
    if any(each.shape != (shape.dim,) for each in weights):
        raise ValueError(f"norms by {tuple(weights[0].shape)} and {tuple(weights[1].shape)} of {shape.dim}")
    widths = (shape.query_dim, shape.kv_dim, shape.kv_dim)
    placed = PlacedDraftRows(
        queries=rows.queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        kv=rows.kv.data_ptr(),
        query_weight=weights[0].data_ptr(),
        key_weight=weights[1].data_ptr(),
    )
    if biases is not None:
        placed.query_bias, placed.key_bias, placed.value_bias = _bias_addresses(biases, widths)
    grid = (len(rows.queries), shape.num_heads + 2 * shape.num_kv_heads, 1)
    args = (placed, shape.argument(), length)
    ROWS.kernel(_instance(PLACE, biases is not None)).launch(grid, WARP_SIZE, args, overlap=True)


def _bias_addresses(biases: Sequence[DeviceArray], widths: Sequence[int]) -> list[int]:
    """ValueError if some bias is not as wide as its rows."""
    if any(bias.shape != (width,) for bias, width in zip(biases, widths, strict=True)):
        shapes = ", ".join(str(tuple(bias.shape)) for bias in biases)
        raise ValueError(f"biases {shapes} of rows of {', '.join(map(str, widths))}")
    return [bias.data_ptr() for bias in biases]


def _instance(template: str, has_bias: bool) -> str:
    return template.format("true" if has_bias else "false")


def place_committed_rows_cuda(
    layers: Sequence[CommittedRowsOfLayer],
    shape: HeadShape,
    contexts: DeviceArray,
    first: DeviceArray | int,
    count: DeviceArray | None = None,
) -> None:
    """Puts rows, with norm and rotation of their keys, into the contexts of MAX_COMMITTED_LAYERS at most.

    contexts: uint8, from the entry of the first of these layers on. first: the position of the first row;
    count: how many there are, by default all. Both may be int32 [1] on the device. ValueError if shapes
    disagree.
    """
    rows = len(layers[0].keys)
    if len(layers) > MAX_COMMITTED_LAYERS or contexts.numel() < len(layers) * CONTEXT_TYPE.itemsize:
        raise ValueError(f"{len(layers)} layers with contexts in {contexts.numel()} bytes")
    has_bias = layers[0].biases is not None
    if any((layer.biases is not None) != has_bias for layer in layers):
        raise ValueError("some layers have biases of keys and values, and others have none")
    committed = CommittedDraftRows(
        first=None if isinstance(first, int) else first.data_ptr(),
        count=None if count is None else count.data_ptr(),
        start=first if isinstance(first, int) else 0,
        rows=rows,
    )
    for entry, layer in zip(committed.at, layers, strict=False):
        kv_shape = (rows, shape.kv_dim)
        is_fitting = layer.keys.shape == layer.values.shape == kv_shape
        if not is_fitting or layer.key_weight.shape != (shape.dim,):
            raise ValueError(
                f"rows {tuple(layer.keys.shape)} by {tuple(layer.key_weight.shape)}, heads of {shape.dim}"
            )
        entry.keys, entry.values = layer.keys.data_ptr(), layer.values.data_ptr()
        entry.key_weight = layer.key_weight.data_ptr()
        if layer.biases is not None:
            entry.key_bias, entry.value_bias = _bias_addresses(layer.biases, (shape.kv_dim, shape.kv_dim))
    grid = (rows, shape.num_kv_heads, len(layers))
    args = (committed, shape.argument(), contexts)
    ROWS.kernel(_instance(PLACE_COMMITTED, has_bias)).launch(grid, WARP_SIZE, args, overlap=True)


def forget_rows_cuda(positions: DeviceArray, length: int) -> None:
    """Has no place of a context hold a row from position `length` on. positions: int32 [places], mutated."""
    count = len(positions)
    args = (positions, count, length)
    ROWS.kernel("forget_draft_rows").launch((-(-count // THREADS), 1, 1), THREADS, args, overlap=True)


def num_splits(most_positions: int, dim: int) -> int:
    """Blocks of threads that share out so many positions, and so parts of an output."""
    return min(MAX_SPLITS, -(-most_positions // _part_positions(dim)))


def parts_shape(rows: int, shape: HeadShape, splits: int) -> tuple[int, int, int]:
    """Of float32 parts: numerators, denominator and maximum of each row's head in each split."""
    return splits, rows * shape.num_heads, shape.dim + 2


def attend_cuda(
    rows: DraftRows,
    shape: HeadShape,
    contexts: DeviceArray,
    view: LayerView,
    length: DeviceArray,
    parts: DeviceArray,
    out: DeviceArray,
    gates: DeviceArray | None = None,
) -> None:
    """Attention of the block's rows, placed before, into float32 `out` [B, query_dim].

    They see what `view` says of its layer's context and of each other. length: as `place_draft_rows_cuda` has
    it; parts: float32, see `parts_shape`. gates: contiguous float32 [B, num_heads], as `reference.gated` has
    them. ValueError if shapes disagree or there are no kernels for such heads.
    """
    num_rows, dim, splits = len(rows.queries), shape.dim, len(parts)
    if dim not in HEAD_SIZES or shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape.num_heads} heads of {dim} over {shape.num_kv_heads}")
    if not rows.fits(shape) or out.shape != rows.queries.shape:
        raise ValueError(f"attention of rows {tuple(rows.queries.shape)} into {tuple(out.shape)}")
    if parts.shape != parts_shape(num_rows, shape, splits):
        raise ValueError(f"parts {tuple(parts.shape)} of {num_rows} rows")
    if gates is not None and (gates.shape != (num_rows, shape.num_heads) or not gates.is_contiguous()):
        raise ValueError(f"gates {tuple(gates.shape)} of {num_rows} rows of {shape.num_heads} heads")
    attention = DraftAttention(
        queries=rows.queries.data_ptr(),
        kv=rows.kv.data_ptr(),
        contexts=contexts.data_ptr(),
        length=length.data_ptr(),
        parts=parts.data_ptr(),
        layer=view.layer,
        rows=num_rows,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        window=view.window or 0,
        is_causal=view.is_causal,
    )
    queries = num_rows * (shape.num_heads // shape.num_kv_heads)
    warps = attending_warps(dim, device_limits().shared_per_block)
    grid = (splits, shape.num_kv_heads, -(-queries // (warps * WARP_QUERIES)))
    ATTENTION.kernel(ATTEND.format(dim, warps)).launch(
        grid, warps * WARP_SIZE, (attention,), shared_bytes=part_bytes(dim, warps), overlap=True
    )
    merged = (num_rows * shape.num_heads, 1, 1)
    ATTENTION.kernel(MERGE.format(dim)).launch(merged, WARP_SIZE, (parts, splits, gates, out), overlap=True)


def score_pairs_cuda(
    predecessors: DeviceArray,
    projected: DeviceArray,
    successors: DeviceArray,
    own: DeviceArray,
    out: DeviceArray,
) -> None:
    """`reference.pair_log_probs` into float32 `out` [L, K, K]. All are float32.

    predecessors, successors: [L, K, rank]; projected: [L, rank]; own: [L, K]. ValueError if shapes disagree.
    """
    positions, ranks, size = predecessors.shape
    is_fitting = successors.shape == predecessors.shape and projected.shape == (positions, size)
    if not is_fitting or own.shape != (positions, ranks) or out.shape != (positions, ranks, ranks):
        raise ValueError(f"pairs of {tuple(predecessors.shape)} and {tuple(successors.shape)}")
    if ranks > MAX_CANDIDATES:
        raise ValueError(f"{ranks} candidates of a position, at most {MAX_CANDIDATES}")
    pairs = DraftPairs(
        predecessors=predecessors.data_ptr(),
        projected=projected.data_ptr(),
        successors=successors.data_ptr(),
        own=own.data_ptr(),
        ranks=ranks,
        size=size,
    )
    ROWS.kernel("score_draft_pairs").launch((positions, ranks, 1), THREADS, (pairs, out), overlap=True)


def choose_chain_cuda(token_ids: DeviceArray, log_probs: DeviceArray, chain: DeviceArray) -> None:
    """`reference.likeliest_chain` of int32 and float32 candidates into int32 `chain`, as long as that is.

    ValueError if shapes disagree.
    """
    positions, ranks = token_ids.shape
    if log_probs.shape not in ((positions, ranks), (positions, ranks, ranks)) or len(chain) > positions:
        raise ValueError(f"{tuple(token_ids.shape)} candidates and {tuple(log_probs.shape)}: {len(chain)}")
    args = (token_ids, log_probs, ranks, log_probs.dim() == 3, chain, len(chain))
    ROWS.kernel("choose_draft_chain").launch((1, 1, 1), WARP_SIZE, args, overlap=True)


def attending_warps(dim: int, shared_per_block: int) -> int:
    """Of a block of threads, for heads of `dim` values on a device with so much shared memory."""
    return next(warps for warps in WARPS if part_bytes(dim, warps) <= shared_per_block)


def part_bytes(dim: int, warps: int) -> int:
    """Shared memory of such a block: `PartMemory` in attend.cu."""
    positions = _part_positions(dim)
    keys, values = positions * (dim + 8) * 2, positions * dim * 2
    return keys + values + 4 * warps * WARP_QUERIES * (dim + positions) + 4 * positions


def _part_positions(dim: int) -> int:
    return 32 if dim > 128 else 64
