"""What a draft block computes between its products, in CUDA C++ over bfloat16 rows.

Contexts are committed rows of one sequence by layer: `CONTEXT_TYPE` entries in the device's memory, each
naming keys and values, bfloat16 [capacity, kv heads, head_dim], and int32 positions [capacity]. The row at
position p lies at p modulo the capacity, with p in `positions`; a negative number there says that none does.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.draft_block import HEAD_SIZES

ROWS = CudaProgram(
    Path(__file__).with_name("rows.cu"),
    (
        *("draft_norm", "draft_convolve", "draft_swiglu"),
        *("place_draft_rows", "place_committed_rows", "choose_draft_chain"),
    ),
)
ATTEND, MERGE = "attend_draft<{}>", "merge_draft<{}>"
ATTENTION = CudaProgram(
    Path(__file__).with_name("attend.cu"),
    tuple(kernel.format(size) for kernel in (ATTEND, MERGE) for size in HEAD_SIZES),
)
THREADS, WARP_SIZE = 256, 32
BLOCK_QUERIES = 32  # of a block of threads
MAX_SPLITS: Final = 64  # of the positions, for blocks of threads that work side by side


@declared_in("draft_block/values.cuh")
class DraftContext(ctypes.Structure):
    """A layer's rows, as in `CONTEXT_TYPE`."""


CONTEXT_TYPE: Final = np.dtype(DraftContext)


@declared_in("draft_block/rows.cu", "DraftConvolution")
class Convolution(ctypes.Structure): ...


@declared_in("draft_block/rows.cu", "DraftRope")
class Rope(ctypes.Structure): ...


@declared_in("draft_block/rows.cu", "DraftHeads")
class Heads(ctypes.Structure): ...


@declared_in("draft_block/rows.cu", "CommittedDraftRows")
class CommittedRows(ctypes.Structure): ...


@declared_in("draft_block/attend.cu", "DraftAttention")
class Attention(ctypes.Structure): ...


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
    def row_size(self) -> int:
        """Of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim

    def heads(self, query_weight: DeviceArray | None, key_weight: DeviceArray | None) -> Heads:
        """With the weights of norms, float32 [dim]; None where the launch reads none."""
        rope = Rope(turns=self.turns.data_ptr(), magnitude=self.magnitude)
        return Heads(
            query_weight=None if query_weight is None else query_weight.data_ptr(),
            key_weight=None if key_weight is None else key_weight.data_ptr(),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            dim=self.dim,
            eps=self.eps,
            rope=rope,
        )


def norm_cuda(x: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray) -> None:
    """`reference.norm` of x [B, E] by float32 `weight` [E] into `out`.

    ValueError if shapes disagree, or rows are not whole eights.
    """
    rows, cols = x.shape
    if out.shape != x.shape or weight.shape != (cols,) or cols % 8:
        raise ValueError(f"a norm of rows {tuple(x.shape)} by {tuple(weight.shape)} into {tuple(out.shape)}")
    ROWS.kernel("draft_norm").launch((rows, 1, 1), THREADS, (x, weight, out, cols, eps), overlap=True)


def convolve_cuda(
    x: DeviceArray,
    base: DeviceArray,
    dynamic: DeviceArray,
    added: DeviceArray | None,
    out: DeviceArray,
) -> None:
    """`reference.convolve` of x [B, E] plus `added` [B, E] into `out`, which may be `added` and not x.

    base: [kernel, E]; dynamic: [B, kernel, groups], whose rows may be apart. ValueError if shapes disagree.
    """
    (rows, cols), (kernel, groups) = x.shape, dynamic.shape[1:]
    is_fitting = base.shape == (kernel, cols) and len(dynamic) == rows and cols % groups == 0
    if not is_fitting or out.shape != x.shape or (added is not None and added.shape != x.shape):
        raise ValueError(f"rows {tuple(x.shape)}, weights {tuple(base.shape)} and {tuple(dynamic.shape)}")
    weights = Convolution(
        base=base.data_ptr(),
        dynamic=dynamic.data_ptr(),
        kernel=kernel,
        group=cols // groups,
        dynamic_stride=dynamic.stride(0),
    )
    grid = (-(-cols // THREADS), rows, 1)
    ROWS.kernel("draft_convolve").launch(grid, THREADS, (x, weights, added, out, cols), overlap=True)


def swiglu_cuda(x: DeviceArray, out: DeviceArray) -> None:
    """`reference.swiglu` of x [B, 2 · F] into `out` [B, F]. ValueError if shapes disagree."""
    rows, size = out.shape
    if x.shape != (rows, 2 * size):
        raise ValueError(f"gates and ups {tuple(x.shape)} into {tuple(out.shape)}")
    ROWS.kernel("draft_swiglu").launch((-(-size // THREADS), rows, 1), THREADS, (x, out, size), overlap=True)


def place_draft_rows_cuda(
    qkv: DeviceArray, shape: HeadShape, weights: tuple[DeviceArray, DeviceArray], length: DeviceArray
) -> None:
    """Norms and rotates the queries and keys of rows qkv [B, row_size] in place.

    weights: of the norms of queries and keys. length: int32 [1] on the device, the position of the first row.
    ValueError if shapes disagree.
    """
    if qkv.shape[1] != shape.row_size or any(each.shape != (shape.dim,) for each in weights):
        raise ValueError(f"rows {tuple(qkv.shape)} of {shape.row_size} values of heads of {shape.dim}")
    grid = (len(qkv), shape.num_heads + shape.num_kv_heads, 1)
    args = (qkv, shape.heads(*weights), length)
    ROWS.kernel("place_draft_rows").launch(grid, WARP_SIZE, args, overlap=True)


def place_committed_rows_cuda(
    kv: DeviceArray,
    shape: HeadShape,
    weights: DeviceArray,
    contexts: DeviceArray,
    first: DeviceArray | int,
    count: DeviceArray | None = None,
) -> None:
    """Puts rows, with norm and rotation of their keys, into the contexts of all layers.

    kv: [layers, n, 2 · kv heads · dim], keys and then values; weights: float32 [layers, dim]; contexts: uint8
    [layers · CONTEXT_TYPE.itemsize]. first: the position of the first row; count: how many there are, by
    default all. Both may be int32 [1] on the device. ValueError if shapes disagree.
    """
    layers, rows, size = kv.shape
    is_fitting = size == 2 * shape.num_kv_heads * shape.dim and weights.shape == (layers, shape.dim)
    if not is_fitting or contexts.numel() < layers * CONTEXT_TYPE.itemsize:
        raise ValueError(f"rows {tuple(kv.shape)} by {tuple(weights.shape)}, heads of {shape.dim}")
    committed = CommittedRows(
        kv=kv.data_ptr(),
        weights=weights.data_ptr(),
        first=None if isinstance(first, int) else first.data_ptr(),
        count=None if count is None else count.data_ptr(),
        start=first if isinstance(first, int) else 0,
        rows=rows,
    )
    grid = (rows, shape.num_kv_heads, layers)
    args = (committed, shape.heads(None, None), contexts)
    ROWS.kernel("place_committed_rows").launch(grid, WARP_SIZE, args, overlap=True)


def num_splits(most_positions: int, dim: int) -> int:
    """Blocks of threads that share out so many positions, and so parts of an output."""
    return min(MAX_SPLITS, -(-most_positions // _part_positions(dim)))


def parts_size(rows: int, shape: HeadShape, splits: int) -> int:
    """float32 values of all parts."""
    return splits * rows * shape.num_heads * (shape.dim + 2)


def attend_cuda(
    qkv: DeviceArray,
    shape: HeadShape,
    contexts: DeviceArray,
    layer: int,
    length: DeviceArray,
    window: int | None,
    is_causal: bool,
    splits: int,
    parts: DeviceArray,
    out: DeviceArray,
) -> None:
    """Attention of the block's rows qkv [B, row_size], placed before, into `out` [B, heads · dim].

    Of the context of `layer` they see what `DflashLayer` says. length: as `place_draft_rows_cuda` has it;
    parts: float32 [`parts_size`]. ValueError if shapes disagree or there are no kernels for such heads.
    """
    rows, dim = len(qkv), shape.dim
    if dim not in HEAD_SIZES or shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape.num_heads} heads of {dim} over {shape.num_kv_heads}")
    if qkv.shape[1] != shape.row_size or out.shape != (rows, shape.num_heads * dim):
        raise ValueError(f"attention of rows {tuple(qkv.shape)} into {tuple(out.shape)}")
    if parts.numel() < parts_size(rows, shape, splits):
        raise ValueError(f"{parts.numel()} values for parts of {rows} rows in {splits} splits")
    attention = Attention(
        qkv=qkv.data_ptr(),
        contexts=contexts.data_ptr(),
        length=length.data_ptr(),
        parts=parts.data_ptr(),
        layer=layer,
        rows=rows,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        window=window or 0,
        is_causal=is_causal,
    )
    queries = rows * (shape.num_heads // shape.num_kv_heads)
    grid = (splits, shape.num_kv_heads, -(-queries // BLOCK_QUERIES))
    ATTENTION.kernel(ATTEND.format(dim)).launch(
        grid, THREADS, (attention,), shared_bytes=_part_bytes(dim), overlap=True
    )
    merged = (rows * shape.num_heads, 1, 1)
    ATTENTION.kernel(MERGE.format(dim)).launch(merged, WARP_SIZE, (parts, splits, out), overlap=True)


def choose_chain_cuda(token_ids: DeviceArray, log_probs: DeviceArray, chain: DeviceArray) -> None:
    """`reference.likeliest_chain` of int32 and float32 candidates into int32 `chain`, as long as that is.

    ValueError if shapes disagree.
    """
    positions, ranks = token_ids.shape
    if log_probs.shape not in ((positions, ranks), (positions, ranks, ranks)) or len(chain) > positions:
        raise ValueError(f"{tuple(token_ids.shape)} candidates and {tuple(log_probs.shape)}: {len(chain)}")
    args = (token_ids, log_probs, ranks, log_probs.dim() == 3, chain, len(chain))
    ROWS.kernel("choose_draft_chain").launch((1, 1, 1), WARP_SIZE, args, overlap=True)


def _part_bytes(dim: int) -> int:
    """Of `PartMemory` in attend.cu."""
    positions = _part_positions(dim)
    keys, values = positions * (dim + 8) * 2, positions * dim * 2
    return keys + values + 4 * BLOCK_QUERIES * (dim + positions) + 4 * positions


def _part_positions(dim: int) -> int:
    return 32 if dim > 128 else 64
