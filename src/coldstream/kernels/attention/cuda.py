"""Attention on the GPU: `prepare.cu`, then `decode.cu` and `merge.cu`, or `prefill.cu` (and `finish.cu`).

    kernels = AttentionKernels(AttentionShape(16, 2, 256, CACHE_TYPES["f16"]), device_limits())
    kernels.prepare(inputs, caches, rows, query)
    kernels.decode(query, query_gate, caches, rows, workspace, out=out)       # a few rows, long contexts
    kernels.prefill(query, query_gate, caches, rows, out)                     # many rows

Nothing here allocates, synchronises or looks at device data: positions and slots are read by the kernels, so
one captured launch serves every context length. T rows, H query heads, G key/value heads, D values a head.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from coldstream.kernels.arithmetic.reference import GROUP_SIZE, QuantActivations
from coldstream.kernels.attention.cache_types import CacheType
from coldstream.kernels.attention.exact import BLOCK_SIZE, CHUNK_SIZE
from coldstream.kernels.cuda.limits import DeviceLimits, overlaps
from coldstream.kernels.cuda.program import CudaProgram, Kernel
from coldstream.kernels.ops import Rows

FOLDER = Path(__file__).parent
LARGEST_HEAD = 512
HEAD_MULTIPLE = 8  # a thread takes eight columns

PREPARE_THREADS, PREPARE_HEADS = 128, 8  # a block
DECODE_THREADS = 256
PREFILL_THREADS = 256
FINISH_THREADS = 256
MERGE_SHARED_BYTES = 2 * 32 * GROUP_SIZE * 4  # two batches of 32 chunks
# Rows of a block of prefill's threads, and shared memory for a part of its keys and of its values.
PrefillTile = tuple[int, int, int]
PREFILL_TILES: tuple[PrefillTile, ...] = (
    (64, 32768, 16384), (64, 16384, 8192), (32, 32768, 16384), (32, 16384, 8192), (16, 32768, 16384),
    (16, 16384, 8192), (16, 8192, 8192),
)  # fmt: skip
PREFILL_MAX_SUMS = 64 * 256  # of a block: more leave no registers for what is on its way
PREFILL_BLOCKS = 1.25, 0.75  # a processor that make the tallest tiles pay, and the next
# Blocks of keys whose scores are computed together, and blocks of keys or values in flight: best first.
DECODE_STAGES = ((4, 6), (4, 5), (2, 4), (2, 3), (1, 2))


@dataclass(frozen=True)
class AttentionShape:
    """What is the same for all rows. `window`: positions that a row looks back on, its own included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_type: CacheType
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads")
        if self.head_dim % HEAD_MULTIPLE or not 0 < self.head_dim <= LARGEST_HEAD:
            raise ValueError(
                f"heads of {self.head_dim} values: the GPU kernels take multiples of {HEAD_MULTIPLE} up to "
                f"{LARGEST_HEAD}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} positions holds nothing")
        self.cache_type.row_bytes(self.head_dim)

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_bytes(self) -> int:
        """Shared memory of a block of 64 positions of one key/value head."""
        row_bytes = self.cache_type.row_bytes(self.head_dim)
        # A row of turned values lies there as a whole, of others codes and scales on their own.
        whole = self.cache_type.is_turned
        code_bytes = row_bytes if whole else self.head_dim * self.cache_type.value_bits // 8
        scale_bytes = row_bytes - code_bytes
        return BLOCK_SIZE * (-(-code_bytes // 128) * 128 + scale_bytes)

    @property
    def decode_heads(self) -> tuple[int, int]:
        """Query heads of an item of work when there are many items, and when there are few."""
        wide = min(8, 1 << (self.group_size - 1).bit_length())
        return wide, min(wide, 2)


@dataclass(frozen=True)
class Caches:
    """Keys and values, [slots, positions, G, row] each, with the same strides; see `cache_types`."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """What `prepare` reads: float32, unit stride along the last dimension; rows may be parts of others."""

    query_gate: torch.Tensor  # [T, H · 2 · D]
    key: torch.Tensor  # [T, G · D]
    value: torch.Tensor  # [T, G · D]
    q_norm: torch.Tensor  # [D]
    k_norm: torch.Tensor  # [D]
    angles: torch.Tensor  # [T, rope dimensions / 2, 2], contiguous
    eps: float


@dataclass(frozen=True)
class DecodeWorkspace:
    """What chunks of positions leave for the merge; contents undefined."""

    values: torch.Tensor  # float32 [T, H, chunks, D]
    stats: torch.Tensor  # float32 [T, H, chunks, 2]

    @staticmethod
    def shapes(shape: AttentionShape, num_rows: int, num_positions: int) -> tuple[tuple[int, ...], ...]:
        """Of the two tensors, for up to `num_rows` rows and contexts of up to `num_positions`."""
        chunks = num_rows, shape.num_heads, -(-num_positions // CHUNK_SIZE)
        return (*chunks, shape.head_dim), (*chunks, 2)


class _Places(ctypes.Structure):
    _fields_ = (("slot_bytes", ctypes.c_int64), ("position_bytes", ctypes.c_int64))


def _structure(
    name: str, pointers: str, ints: str, floats: str = "", *, has_places: bool = True
) -> type[ctypes.Structure]:
    """The arguments of a kernel: addresses, the places of the caches, then int32 and float32 numbers."""
    fields = [
        *((field, ctypes.c_void_p) for field in pointers.split()),
        *([("places", _Places)] if has_places else []),
        *((field, ctypes.c_int32) for field in ints.split()),
        *((field, ctypes.c_float) for field in floats.split()),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_PrepareArguments = _structure(
    "_PrepareArguments",
    "query_gate key value q_norm k_norm angles positions slots query k_cache v_cache",
    "query_gate_stride key_stride value_stride num_heads num_kv_heads rope_half",
    "eps",
)
_DecodeArguments = _structure(
    "_DecodeArguments",
    "query k_cache v_cache positions slots values stats",
    "num_rows num_heads num_kv_heads max_chunks window",
)
_MergeArguments = _structure(
    "_MergeArguments",
    "values query_gate stats positions out codes scales sums",
    "query_gate_stride num_heads max_chunks window",
    has_places=False,
)
_PrefillArguments = _structure(
    "_PrefillArguments",
    "query query_gate k_cache v_cache positions slots out",
    "query_gate_stride num_tokens num_heads num_kv_heads window",
)

_FinishArguments = _structure(
    "_FinishArguments", "out query_gate", "query_gate_stride num_heads", has_places=False
)


def launch_merge(
    kernel: Kernel,
    shape: AttentionShape,
    workspace: DecodeWorkspace,
    query_gate: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    quantised: QuantActivations | None = None,
) -> None:
    """Merges the chunks in `workspace` of rows at `positions`; see `AttentionKernels.decode`."""
    codes = (None,) * 3 if quantised is None else (quantised.q, quantised.scales, quantised.sums)
    arguments = _MergeArguments(
        *_addresses(workspace.values, query_gate, workspace.stats, positions, out, *codes),
        query_gate.stride(0), shape.num_heads, workspace.values.shape[2], shape.window or 0,
    )  # fmt: skip
    groups = -(-shape.num_heads * shape.head_dim // GROUP_SIZE)
    kernel.launch(
        (groups, len(positions), 1), GROUP_SIZE, (arguments,), shared_bytes=MERGE_SHARED_BYTES, overlap=True
    )


@functools.cache
def attention_kernels(shape: AttentionShape, device: DeviceLimits) -> "AttentionKernels":
    """The same for all models: what is loaded stays loaded, as the kernels of other operations do."""
    return AttentionKernels(shape, device)


class AttentionKernels:
    """The kernels for one shape on one device, compiled when first used."""

    def __init__(self, shape: AttentionShape, device: DeviceLimits) -> None:
        self.shape = shape
        self.device = device
        self.decode_stages = self._choose_stages()
        self.prefill_tiles = self._choose_tiles()
        names: dict[str, list[str]] = {}
        for file, name in self.instances:
            names.setdefault(file, []).append(name)
        self._programs = {file: CudaProgram(FOLDER / file, of_file) for file, of_file in names.items()}

    @property
    def instances(self) -> tuple[tuple[str, str], ...]:
        """Source file and template instance of the kernels."""
        head = f"coldstream::cache_{self.shape.cache_type.name}, {self.shape.head_dim}"
        wide, narrow = self.shape.decode_heads
        blocks, stages = self.decode_stages
        turned = self.shape.cache_type.is_turned
        rotation = "of_32" if turned else "none"
        return (
            ("prepare.cu", f"coldstream::attention_prepare<{head}>"),
            ("decode.cu", f"coldstream::attention_decode<{head}, {wide}, {narrow}, {blocks}, {stages}>"),
            (
                "merge.cu",
                f"coldstream::attention_merge<{self.shape.head_dim}, coldstream::rotation::{rotation}>",
            ),
            *(("prefill.cu", self._prefill_instance(tile)) for tile in self.prefill_tiles),
            *([("finish.cu", f"coldstream::attention_finish<{self.shape.head_dim}>")] if turned else []),
        )

    @property
    def decode_shared_bytes(self) -> int:
        return self._decode_bytes(self.decode_stages[1])

    def prepare(self, inputs: AttentionInputs, caches: Caches, rows: Rows, query: torch.Tensor) -> None:
        """Writes query float32 [T, H, D], and the rows' places in the caches."""
        shape, num_rows = self.shape, inputs.key.shape[0]
        arguments = _PrepareArguments(
            *_addresses(
                inputs.query_gate, inputs.key, inputs.value, inputs.q_norm, inputs.k_norm, inputs.angles,
                rows.positions, rows.slots, query, caches.k, caches.v,
            ),
            self._places(caches),
            inputs.query_gate.stride(0), inputs.key.stride(0), inputs.value.stride(0),
            shape.num_heads, shape.num_kv_heads, inputs.angles.shape[-2], inputs.eps,
        )  # fmt: skip
        blocks = -(-(shape.num_heads + 2 * shape.num_kv_heads) // PREPARE_HEADS)
        self._kernel("prepare.cu").launch(
            (num_rows, blocks, 1), PREPARE_THREADS, (arguments,), overlap=overlaps(num_rows)
        )

    def decode(
        self,
        query: torch.Tensor,
        query_gate: torch.Tensor,
        caches: Caches,
        rows: Rows,
        workspace: DecodeWorkspace,
        *,
        out: torch.Tensor | None = None,
        quantised: QuantActivations | None = None,
    ) -> None:
        """Gated attention of every row to its slot up to its position, as float32, as int8, or as both.

        query: as `prepare` leaves it; query_gate [T, H · 2 · D], any row stride. Writes out float32
        [T, H · D] and quantised (K = H · D, padded to whole groups), contiguous. Two launches.
        """
        shape, num_rows = self.shape, query.shape[0]
        max_chunks = workspace.values.shape[2]
        window = shape.window or 0
        arguments = _DecodeArguments(
            *_addresses(
                query, caches.k, caches.v, rows.positions, rows.slots, workspace.values, workspace.stats
            ),
            self._places(caches), num_rows, shape.num_heads, shape.num_kv_heads, max_chunks, window,
        )  # fmt: skip
        parts = -(-shape.group_size // shape.decode_heads[1])
        most_items = num_rows * max_chunks * shape.num_kv_heads * parts
        grid = min(most_items, self.device.num_processors)
        self._kernel("decode.cu").launch(
            (grid, 1, 1), DECODE_THREADS, (arguments,), shared_bytes=self.decode_shared_bytes, overlap=True
        )
        launch_merge(
            self._kernel("merge.cu"),
            shape,
            workspace,
            query_gate,
            rows.positions,
            out=out,
            quantised=quantised,
        )

    def prefill(
        self, query: torch.Tensor, query_gate: torch.Tensor, caches: Caches, rows: Rows, out: torch.Tensor
    ) -> None:
        """The same for many rows, by tiles of tokens and heads. Writes out float32 [T, H · D], contiguous."""
        shape, num_rows = self.shape, query.shape[0]
        arguments = _PrefillArguments(
            *_addresses(query, query_gate, caches.k, caches.v, rows.positions, rows.slots, out),
            self._places(caches),
            query_gate.stride(0), num_rows, shape.num_heads, shape.num_kv_heads, shape.window or 0,
        )  # fmt: skip
        tile = self.prefill_tile(num_rows)
        program = self._programs["prefill.cu"]
        program.kernel(self._prefill_instance(tile)).launch(
            (self._prefill_blocks(num_rows, tile), 1, 1), PREFILL_THREADS, (arguments,),
            shared_bytes=self.prefill_shared_bytes(tile),
        )  # fmt: skip
        if shape.cache_type.is_turned:
            finishing = _FinishArguments(*_addresses(out, query_gate), query_gate.stride(0), shape.num_heads)
            columns = shape.num_heads * shape.head_dim
            self._kernel("finish.cu").launch(
                (-(-columns // FINISH_THREADS), num_rows, 1), FINISH_THREADS, (finishing,)
            )

    def prefill_tile(self, num_rows: int) -> PrefillTile:
        """The tallest that gives the processors enough to do; the shortest where none does."""
        for tile, blocks in zip(self.prefill_tiles, PREFILL_BLOCKS, strict=False):
            if self._prefill_blocks(num_rows, tile) >= blocks * self.device.num_processors:
                return tile
        return self.prefill_tiles[-1]

    def prefill_shared_bytes(self, tile: PrefillTile) -> int:
        num_rows, key_bytes, value_bytes = tile
        head_dim = self.shape.head_dim
        key_dims = min(key_bytes // (4 * BLOCK_SIZE), -(-head_dim // 32) * 32)
        # After eight dimensions and after a position's weights there are gaps.
        queries, keys = head_dim // 8 * (8 * num_rows + 4), key_dims // 8 * (8 * BLOCK_SIZE + 4)
        weights = BLOCK_SIZE * (num_rows + 8) + 4 * num_rows
        return 4 * (queries + 2 * (keys + weights + value_bytes // 4) + 2 * num_rows)

    def _prefill_instance(self, tile: PrefillTile) -> str:
        head = f"coldstream::cache_{self.shape.cache_type.name}, {self.shape.head_dim}"
        return f"coldstream::attention_prefill<{head}, {', '.join(map(str, tile))}>"

    def _prefill_blocks(self, num_rows: int, tile: PrefillTile) -> int:
        return -(-num_rows * self.shape.group_size // tile[0]) * self.shape.num_kv_heads

    def _kernel(self, file: str) -> Kernel:
        program = self._programs[file]
        return program.kernel(program.instances[0])

    def _places(self, caches: Caches) -> _Places:
        for cache in (caches.k, caches.v):
            found = self.shape.cache_type.of(cache, self.shape.head_dim)
            if found != self.shape.cache_type or cache.shape[2] != self.shape.num_kv_heads:
                raise ValueError(f"a cache of shape {tuple(cache.shape)} is not one of {self.shape}")
            if cache.stride() != caches.k.stride() or cache.stride()[2:] != (cache.shape[3], 1):
                raise ValueError("heads of a position must be adjacent, and keys and values laid out alike")
        return _Places(caches.k.stride(0) * caches.k.itemsize, caches.k.stride(1) * caches.k.itemsize)

    def _decode_bytes(self, stages: int) -> int:
        # As many heads as keep every thread that sums values at as many.
        wide, _ = self.shape.decode_heads
        mix_heads = -(-wide // (DECODE_THREADS // (self.shape.head_dim // 2)))
        padded = -(-wide // mix_heads) * mix_heads
        places = CHUNK_SIZE + CHUNK_SIZE // BLOCK_SIZE
        return stages * self.shape.block_bytes + 4 * (wide * self.shape.head_dim + padded * places)

    def _choose_stages(self) -> tuple[int, int]:
        for blocks, stages in DECODE_STAGES:
            if self._decode_bytes(stages) <= self.device.shared_per_block:
                return blocks, stages
        raise ValueError(
            f"{self.shape} does not fit into {self.device.shared_per_block} bytes of shared memory"
        )

    def _choose_tiles(self) -> tuple[PrefillTile, ...]:
        """The best of each height that fits, the tallest first."""
        best: dict[int, PrefillTile] = {}
        for tile in PREFILL_TILES:
            fits = self.prefill_shared_bytes(tile) <= self.device.shared_per_block
            if fits and tile[0] * self.shape.head_dim <= PREFILL_MAX_SUMS:
                best.setdefault(tile[0], tile)
        if not best:
            raise ValueError(
                f"{self.shape} does not fit into {self.device.shared_per_block} bytes of shared memory"
            )
        return tuple(best.values())


def _addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
