"""Attention over caches of an integer type on the GPU: `integers_prepare.cu`, `integers.cu` and `merge.cu`.

    kernels = IntegerKernels(AttentionShape(16, 2, 256, CACHE_TYPES["i16"]), device_limits())
    kernels.prepare(inputs, caches, rows, queries)
    kernels.attend(queries, caches, rows, workspace, has_trees=False)
    kernels.merge(query_gate, rows, workspace, out=out)

Nothing here allocates, synchronises or looks at device data. T rows, H query heads, G key/value heads, D
values a head.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from coldstream.errors import UnsupportedError
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.attention.cache_layout import CacheLayout
from coldstream.kernels.attention.cuda import (
    PREPARE_HEADS,
    PREPARE_THREADS,
    AttentionInputs,
    AttentionShape,
    Caches,
    DecodeWorkspace,
    launch_merge,
)
from coldstream.kernels.attention.exact import BLOCK_SIZE
from coldstream.kernels.cuda.limits import DeviceLimits, overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.ops import MAX_TREE_ROWS, Rows

FOLDER = Path(__file__).parent
PAIRS = 16  # of a row and a query head, which a warp takes
WARPS = (4, 2, 1)  # of a block of threads: the first that fit
HEAD_MULTIPLE = 32
LARGEST_HEAD = 256


@dataclass(frozen=True)
class IntegerQueries:
    """Rotated queries of new rows, rounded: docs/arithmetic.md, Attention over integers."""

    codes: torch.Tensor  # int8 [T, H, 2, D], high planes and low planes
    scales: torch.Tensor  # float32 [T, H]


class BatchArguments(ctypes.Structure):
    """`batch_rows` of integers_tile.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("positions", "segments", "tables", "indices", "parents", "kept")
        ),
        *((name, ctypes.c_int32) for name in ("num_rows", "table_stride")),
    )

    @classmethod
    def of(cls, rows: Rows) -> "BatchArguments":
        """ValueError for rows that are told apart by slots."""
        batch = rows.batch
        if batch is None:
            raise ValueError("attention over integers takes rows with block tables")
        tensors = (rows.positions, batch.segments, batch.tables, batch.indices, batch.parents, batch.kept)
        return cls(*(tensor.data_ptr() for tensor in tensors), len(rows.positions), batch.tables.stride(0))


class BlockPlaces(ctypes.Structure):
    """`block_places` of integers_tile.cuh."""

    _fields_ = (("block_bytes", ctypes.c_int64), ("position_bytes", ctypes.c_int64))


class IntegersArguments(ctypes.Structure):
    """`integers_arguments` of integers.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "query_scales", "k_cache", "v_cache", "values", "stats")
        ),
        ("rows", BatchArguments),
        ("places", BlockPlaces),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "max_chunks", "window")),
    )


class PrepareIntegersArguments(ctypes.Structure):
    """`prepare_integers_arguments` of integers_prepare.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("query_gate", "key", "value", "q_norm", "k_norm", "angles"),
                *("query", "query_scales", "k_cache", "v_cache"),
            )
        ),
        ("rows", BatchArguments),
        ("places", BlockPlaces),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("query_gate_stride", "key_stride", "value_stride"),
                *("num_heads", "num_kv_heads", "rope_half"),
            )
        ),
        ("eps", ctypes.c_float),
    )


class IntegerKernels:
    """The kernels for one shape on one device, compiled when first used."""

    def __init__(self, shape: AttentionShape, device: DeviceLimits) -> None:
        if shape.cache_type.is_packed:
            raise UnsupportedError(
                f"{shape.cache_type.name}: the GPU's attention over integers reads whole bytes; choose "
                "another type for keys and values"
            )
        if shape.head_dim % HEAD_MULTIPLE or shape.head_dim > LARGEST_HEAD:
            raise UnsupportedError(
                f"heads of {shape.head_dim} values: the GPU's attention over integers takes multiples of "
                f"{HEAD_MULTIPLE} up to {LARGEST_HEAD}; choose another type for keys and values"
            )
        self.shape = shape
        self.device = device
        fitting = [warps for warps in WARPS if self._shared_bytes(warps) <= device.shared_per_block]
        if not fitting or PAIRS * fitting[0] < shape.group_size:
            raise UnsupportedError(
                f"{shape.group_size} heads of {shape.head_dim} values on one key/value head: the GPU's "
                "attention over integers has no tile for so many; choose another type for keys and values"
            )
        self.warps = fitting[0]
        planes, head_dim = shape.cache_type.num_planes, shape.head_dim
        prepare = f"coldstream::attention_prepare_integers<{planes}, {head_dim}>"
        merge = f"coldstream::attention_merge<{head_dim}, coldstream::rotation::of_head>"
        self._prepare = CudaProgram(FOLDER / "integers_prepare.cu", (prepare,))
        self._attend = CudaProgram(FOLDER / "integers.cu", (self._instance(False), self._instance(True)))
        self._merge = CudaProgram(FOLDER / "merge.cu", (merge,))

    def _shared_bytes(self, warps: int) -> int:
        return shared_bytes(self.shape.cache_type, self.shape.head_dim, warps)

    def prepare(self, inputs: AttentionInputs, caches: Caches, rows: Rows, queries: IntegerQueries) -> None:
        """Writes `queries`, and the rows' places in the caches [blocks, 256, G, row].

        ValueError for rows without block tables.
        """
        shape, num_rows = self.shape, len(rows.positions)
        arguments = PrepareIntegersArguments(
            *(
                tensor.data_ptr()
                for tensor in (
                    *(inputs.query_gate, inputs.key, inputs.value),
                    *(inputs.q_norm, inputs.k_norm, inputs.angles),
                    *(queries.codes, queries.scales, caches.k, caches.v),
                )
            ),
            BatchArguments.of(rows),
            _places(caches),
            inputs.query_gate.stride(0), inputs.key.stride(0), inputs.value.stride(0),
            shape.num_heads, shape.num_kv_heads, inputs.angles.shape[-2], inputs.eps,
        )  # fmt: skip
        blocks = -(-(shape.num_heads + 2 * shape.num_kv_heads) // PREPARE_HEADS)
        self._prepare.kernel(self._prepare.instances[0]).launch(
            (num_rows, blocks, 1), PREPARE_THREADS, (arguments,), overlap=overlaps(num_rows)
        )

    def merge(
        self,
        query_gate: torch.Tensor,
        rows: Rows,
        workspace: DecodeWorkspace,
        *,
        out: torch.Tensor | None = None,
        quantised: QuantActivations | None = None,
    ) -> None:
        """Gated attention of every row, as float32, as int8, or as both, from what `attend` has left.

        query_gate [T, H · 2 · D], any row stride. Writes out float32 [T, H · D] and quantised (K = H · D,
        padded to whole groups), contiguous.
        """
        kernel = self._merge.kernel(self._merge.instances[0])
        launch_merge(kernel, self.shape, workspace, query_gate, rows.positions, out=out, quantised=quantised)

    def attend(
        self,
        queries: IntegerQueries,
        caches: Caches,
        rows: Rows,
        workspace: DecodeWorkspace,
        *,
        has_trees: bool,
    ) -> None:
        """What each chunk of 256 positions leaves of each row and head, in `workspace`.

        caches: [blocks, 256, G, row]. has_trees: whether there may be draft trees among the rows. ValueError
        for rows without block tables.
        """
        shape = self.shape
        max_chunks = workspace.values.shape[2]
        arguments = IntegersArguments(
            *(
                tensor.data_ptr()
                for tensor in (
                    queries.codes, queries.scales, caches.k, caches.v, workspace.values, workspace.stats
                )
            ),
            BatchArguments.of(rows),
            _places(caches),
            shape.num_heads, shape.num_kv_heads, max_chunks, shape.window or 0,
        )  # fmt: skip
        tiles = -(-len(rows.positions) // (PAIRS * self.warps // shape.group_size))
        grid = min(tiles * max_chunks * shape.num_kv_heads, self.device.num_processors)
        self._attend.kernel(self._instance(has_trees)).launch(
            (grid, 1, 1),
            32 * self.warps,
            (arguments,),
            shared_bytes=self._shared_bytes(self.warps),
            overlap=True,
        )

    def _instance(self, has_trees: bool) -> str:
        shape = self.shape
        numbers = f"{shape.cache_type.num_planes}, {shape.head_dim}, {self.warps}"
        return f"coldstream::attention_integers<{numbers}, {str(has_trees).lower()}>"


def shared_bytes(layout: CacheLayout, head_dim: int, warps: int) -> int:
    """Two blocks of keys or values, queries and weights of each warp, and the positions of a tree's rows."""
    per_warp = PAIRS * (2 * head_dim + 16 + 4 * BLOCK_SIZE)
    return 2 * BLOCK_SIZE * layout.row_bytes(head_dim) + warps * per_warp + 4 * MAX_TREE_ROWS


def _places(caches: Caches) -> BlockPlaces:
    """ValueError unless heads of a position are adjacent, and keys and values laid out alike."""
    for cache in (caches.k, caches.v):
        if cache.dtype != torch.int8 or cache.stride() != caches.k.stride():
            raise ValueError(
                f"{tuple(cache.shape)} {cache.dtype} is no cache of an integer type like its other"
            )
        if cache.stride()[2:] != (cache.shape[3], 1):
            raise ValueError("heads of a position must be adjacent")
    return BlockPlaces(caches.k.stride(0), caches.k.stride(1))
