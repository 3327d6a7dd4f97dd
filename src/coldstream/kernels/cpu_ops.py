"""The operations on the CPU, by C++ kernels: `ops.py` has their meaning, `docs/arithmetic.md` their bits.

Called plainly, a method runs at once. Inside `capture` it only records: the forward pass runs once in Python
and becomes a graph that C++ replays with any number of rows, without Python between the operations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from coldstream.errors import UnsupportedError
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels import _csrc
from coldstream.kernels.arena import Arena
from coldstream.kernels.composed_ops import ComposedOps
from coldstream.kernels.gathered_rows import read_rows
from coldstream.kernels.indexer.records import ChosenBlocks, IndexerHeads, IndexerInputs
from coldstream.kernels.ngram import NGRAM_CACHE_BYTES
from coldstream.kernels.ops import (
    BLOCK_POSITIONS,
    SWIGLU,
    Activation,
    AttentionHeads,
    AttentionInputs,
    BatchRows,
    Caches,
    CommittedPath,
    DeltaNetInputs,
    DeltaNetWeights,
    ExpertBiases,
    ExpertWeights,
    NgramHash,
    NgramState,
    RecurrentLayer,
    RopeSpec,
    RouterWeights,
    Rows,
)

Array = np.ndarray[Any, Any]
Outputs = TypeVar("Outputs")
Progress = Callable[[int, int], None]

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class CapturedGraph(Generic[Outputs]):
    """A captured forward pass: write its inputs, `run(rows)`, read the first rows of `outputs`.

    The graph points into the arena, and into inputs, caches and weights that the caller must keep alive.
    """

    graph: _csrc.Graph
    outputs: Outputs
    arena: Arena

    def run(self, rows: int) -> None:
        """Raises ModelChangedError if a page of the model file has vanished; outputs are then undefined."""
        self.graph.run(rows)


class CpuOps(ComposedOps):
    """`Ops` over the C++ kernels; one thread pool and one instruction-set tier.

    tier is "auto" or one of generic, avx2, avx_vnni, avx512, amx, neon and dotprod. UnsupportedError for one
    that this machine lacks.
    """

    _ngram_cache_bytes = NGRAM_CACHE_BYTES

    def __init__(self, threads: int, tier: str = "auto") -> None:
        try:
            self._runtime = _csrc.Runtime(threads, tier)
        except ValueError as error:
            raise UnsupportedError(str(error)) from error
        self._arena: Arena | None = None
        self._maps: dict[tuple[GGUFFile, int], _csrc.MappedFile] = {}
        self._mapped_weights: list[tuple[_csrc.MappedFile, TensorInfo]] = []
        self.ngram_tables: list[_csrc.NgramTable] = []

    @classmethod
    def beside(cls, other: "CpuOps") -> "CpuOps":
        """Plain operations over the threads and the mapped files of others, whatever kind those are."""
        ops = cls.__new__(cls)
        ops._runtime, ops._maps = other._runtime, other._maps
        ops._arena, ops._mapped_weights, ops.ngram_tables = None, [], []
        return ops

    @property
    def runtime(self) -> _csrc.Runtime:
        """The threads and the tier, for others that need them."""
        return self._runtime

    @property
    def tier(self) -> str:
        """The tier that runs."""
        return str(self._runtime.tier)

    @property
    def threads(self) -> int:
        """Threads of the pool, the calling one included."""
        return int(self._runtime.threads)

    def capture(self, capacity: int, build: Callable[[], Outputs]) -> CapturedGraph[Outputs]:
        """Records the operations that `build` calls, all on arrays of `capacity` rows."""
        self._arena = arena = Arena()
        self._runtime.begin_capture(capacity)
        try:
            outputs = build()
        finally:
            graph = self._runtime.end_capture()
            self._arena = None
        return CapturedGraph(graph, outputs, arena)

    def read_ahead(self, progress: Progress, free_bytes: int) -> None:
        """Reads the mapped weights into the page cache, unless they exceed `free_bytes`.

        progress is called with (done, total) bytes. Raises ModelChangedError if the file shrank.
        """
        total = sum(info.num_bytes for _, info in self._mapped_weights)
        if total > free_bytes:
            return
        done = 0
        for mapped, info in self._mapped_weights:
            _csrc.touch_pages(self._runtime, mapped, info.offset, info.num_bytes)
            done += info.num_bytes
            progress(done, total)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.zeros(shape, dtype)

    def int_vector(self, values: Sequence[int]) -> Array:
        return np.array(values, np.int32)

    def _empty(self, *shape: int, dtype: np.dtype[Any] = FLOAT32) -> Array:
        if self._arena is None:
            return np.empty(shape, dtype)
        return self._arena.empty(shape, dtype)

    def load_weight(self, file: GGUFFile, info: TensorInfo) -> _csrc.Weight:
        """A copy in memory with large pages, which makes a token 5 % faster than mapped weights."""
        rows, cols = info.shape
        return _csrc.Weight.from_array(file.read(info), int(info.quant_type), rows, cols)

    def load_rows(self, file: GGUFFile, info: TensorInfo, row_ids: Sequence[int]) -> _csrc.Weight:
        blocks, quant_type = read_rows(file, info, row_ids), int(info.quant_type)
        return _csrc.Weight.from_array(blocks, quant_type, len(row_ids), info.shape[1])

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> _csrc.Weight:
        """The tensor in the mapped file; nothing is read."""
        mapped = self.mapped_file(file, info.shard)
        self._mapped_weights.append((mapped, info))
        *stack, rows, cols = info.shape
        return _csrc.Weight.from_file(mapped, info.offset, int(info.quant_type), rows, cols, math.prod(stack))

    def mapped_file(self, file: GGUFFile, shard: int) -> _csrc.MappedFile:
        """A mapped file of the model; mapped once, until these operations are deleted."""
        if (file, shard) not in self._maps:
            name = file.shown_paths[shard]
            self._maps[file, shard] = _csrc.MappedFile(file.descriptor(shard), file.shard_bytes[shard], name)
        return self._maps[file, shard]

    def use_map(self, file: GGUFFile, shard: int, mapped: _csrc.MappedFile) -> None:
        """Has `mapped_file` return a mapping that exists already."""
        self._maps[file, shard] = mapped

    def load_float_weight(
        self, file: GGUFFile, info: TensorInfo, scales: Array | None = None
    ) -> _csrc.Weight:
        if scales is None and info.quant_type in (QuantType.F32, QuantType.F16, QuantType.BF16):
            return self.load_weight(file, info)
        values = self.read_values(file, info)
        if scales is not None:
            values *= scales
        return _csrc.Weight.from_array(values.reshape(-1).view(np.uint8), int(QuantType.F32), *info.shape)

    def read_values(self, file: GGUFFile, info: TensorInfo) -> Array:
        *rest, cols = info.shape
        out = np.empty(info.shape, np.float32)
        weight = _csrc.Weight.from_array(file.read(info), int(info.quant_type), math.prod(rest), cols)
        _csrc.dequantize(self._runtime, weight, out)
        return out

    def float_array(self, values: Array) -> Array:
        """The values themselves."""
        return values

    def split_rows(self, weight: _csrc.Weight, sizes: Sequence[int]) -> tuple[_csrc.Weight, ...]:
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(weight.rows(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))

    def embed(self, table: _csrc.Weight, token_ids: Array) -> Array:
        out = self._empty(token_ids.shape[0], table.num_cols)
        _csrc.embed(self._runtime, table, token_ids, out)
        return out

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        out = self._empty(*x.shape)
        _csrc.rms_norm(self._runtime, x, weight, eps, out)
        return out

    def rms_norm_pair(self, x: Array, x_weight: Array, y: Array, y_weight: Array, eps: float) -> Array:
        size = x.shape[1]
        out = self._empty(x.shape[0], 2 * size)
        _csrc.rms_norm(self._runtime, x, x_weight, eps, out[:, :size])
        _csrc.rms_norm(self._runtime, y, y_weight, eps, out[:, size:])
        return out

    def linear(self, x: Array, weights: Sequence[_csrc.Weight]) -> tuple[Array, ...]:
        outs = [self._empty(x.shape[0], weight.num_rows) for weight in weights]
        _csrc.linear(self._runtime, x, list(weights), outs)
        return tuple(outs)

    def add_bias(self, x: Array, bias: Array) -> Array:
        _csrc.add_bias(self._runtime, x, bias, x)
        return x

    def scale(self, x: Array, factor: float) -> Array:
        _csrc.scale(self._runtime, x, factor, x)
        return x

    def softcap(self, x: Array, cap: float) -> Array:
        _csrc.softcap(self._runtime, x, cap, x)
        return x

    def add(self, x: Array, y: Array) -> Array:
        out = self._empty(*x.shape)
        _csrc.add(self._runtime, x, y, out)
        return out

    def inject(
        self, streams: Array | None, update: Array, injection: Array | None, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        total, normed = (self._empty(update.shape[0], len(weight)) for _ in range(2))
        _csrc.inject_norm(self._runtime, streams, update, injection, weight, eps, total, normed)
        return total, normed

    def scaled_silu(self, x: Array, divisor: int) -> Array:
        out = self._empty(*x.shape)
        _csrc.scaled_silu(self._runtime, x, divisor, out)
        return out

    def mix_streams(self, normed: Array, gates: Array, num_streams: int) -> Array:
        out = self._empty(normed.shape[0], normed.shape[1] // num_streams)
        _csrc.mix_streams(self._runtime, normed, gates, out)
        return out

    def norm_streams(self, x: Array, weight: Array, eps: float, num_streams: int) -> Array:
        out, size = self._empty(*x.shape), x.shape[1] // num_streams
        for begin in range(0, x.shape[1], size):
            part = slice(begin, begin + size)
            _csrc.rms_norm(self._runtime, x[:, part], weight[part], eps, out[:, part])
        return out

    def project_streams(
        self, x: Array, norm: Array, eps: float, weight: _csrc.Weight, num_streams: int
    ) -> Array:
        normed, width = self.rms_norm(x, norm, eps), x.shape[1] // num_streams
        out = self._empty(x.shape[0], num_streams * weight.num_rows)
        for stream in range(num_streams):
            of_x = slice(stream * width, (stream + 1) * width)
            of_out = slice(stream * weight.num_rows, (stream + 1) * weight.num_rows)
            _csrc.linear(self._runtime, normed[:, of_x], [weight], [out[:, of_out]])
        return out

    def map_ngram_table(self, file: GGUFFile, info: TensorInfo, hashing: NgramHash) -> _csrc.NgramTable:
        """Read row by row, and never mapped. Rows that were used are kept in `NGRAM_CACHE_BYTES`."""
        num_rows, num_cols = info.shape
        table = _csrc.NgramTable(
            file.descriptor(info.shard), info.offset, int(info.quant_type), num_rows, num_cols,
            info.num_bytes // num_rows, self._ngram_cache_bytes,
        )  # fmt: skip
        self.ngram_tables.append(table)
        return table

    def ngram_ids(
        self, token_ids: Array, hashing: NgramHash, table: _csrc.NgramTable, state: NgramState, rows: Rows
    ) -> Array:
        out = self._empty(token_ids.shape[0], len(hashing.sizes), dtype=np.dtype(np.int32))
        _csrc.ngram_ids(
            self._runtime, token_ids, hashing.multipliers, hashing.sizes, hashing.offsets, hashing.end_token,
            state.tokens, rows.state_ids, out, batch_rows(rows.batch), state.kept_tokens, table,
        )  # fmt: skip
        return out

    def ngram_rows(self, table: _csrc.NgramTable, ids: Array) -> Array:
        out = self._empty(ids.shape[0], ids.shape[1] * table.num_cols)
        _csrc.ngram_rows(self._runtime, table, ids, out)
        return out

    def ngram_gate(self, key: Array, query: Array, value: Array) -> Array:
        out = self._empty(*key.shape)
        _csrc.ngram_gate(self._runtime, key, query, value, out)
        return out

    def ngram_conv(
        self,
        streams: Array,
        gated: Array,
        normed: Array,
        taps: Array,
        dilation: int,
        state: NgramState,
        rows: Rows,
    ) -> Array:
        out = self._empty(*streams.shape)
        _csrc.ngram_conv(
            self._runtime, streams, gated, normed, taps, dilation, state.conv, rows.state_ids, out,
            batch_rows(rows.batch), state.kept_rows,
        )  # fmt: skip
        return out

    def commit_ngram(self, state: NgramState, path: CommittedPath) -> None:
        sources = path.kept[: self._num_rows_of(path)]
        _csrc.commit_ngram(
            self._runtime,
            state.kept_tokens,
            state.kept_rows,
            state.tokens,
            state.conv,
            path.state_id,
            sources,
        )

    def glu(self, gate: Array, up: Array, activation: Activation = SWIGLU) -> Array:
        out = self._empty(*gate.shape)
        _csrc.glu(self._runtime, gate, up, out, activation.number, activation.limit)
        return out

    def rope_angles(self, positions: Array, rope: RopeSpec) -> Array:
        out = self._empty(positions.shape[0], rope.num_dims // 2, 2)
        scaling, factors, magnitude = rope.scaling, None, 1.0
        if scaling is not None:
            factors = np.array(scaling.frequency_factors, np.float64)
            magnitude = scaling.magnitude
        _csrc.rope_angles(self._runtime, positions, rope.theta, out, factors, magnitude, rope.block_size)
        return out

    def attention(self, inputs: AttentionInputs, heads: AttentionHeads, caches: Caches, rows: Rows) -> Array:
        num_rows, width = inputs.query_gate.shape
        out = self._empty(num_rows, width // (2 if heads.output_gate == "query" else 1))
        _csrc.attention(
            self._runtime, inputs.query_gate, inputs.key, inputs.value, inputs.angles, heads,
            caches.k, caches.v, rows.positions, rows.state_ids, out, batch_rows(rows.batch), inputs.gate,
            None if inputs.chosen is None else (inputs.chosen.words, inputs.chosen.block_size),
        )  # fmt: skip
        return out

    def choose_blocks(
        self, inputs: IndexerInputs, heads: IndexerHeads, cache: Array, rows: Rows
    ) -> ChosenBlocks:
        length = cache.shape[1] if rows.batch is None else rows.batch.tables.shape[1] * BLOCK_POSITIONS
        words = self._empty(len(inputs.key), heads.num_words(length), dtype=np.dtype(np.int32))
        _csrc.choose_blocks(
            self._runtime, inputs.query, inputs.key, inputs.angles, inputs.block_angles, heads, cache,
            rows.positions, rows.state_ids, words, batch_rows(rows.batch),
        )  # fmt: skip
        return ChosenBlocks(words, heads.block_size)

    def gated_delta_net(
        self, inputs: DeltaNetInputs, weights: DeltaNetWeights, conv_state: Array, state: Array
    ) -> Array:
        out, rows = self._empty(*inputs.z.shape), inputs.rows
        to = rows.batch.inputs if rows.batch else None
        kept = (to.qkv, to.alpha, to.beta) if to else None
        _csrc.gated_delta_net(
            self._runtime, inputs.qkv, inputs.z, inputs.alpha, inputs.beta, weights.conv_taps, weights.a,
            weights.dt_bias, weights.norm, weights.key_head_ids, weights.num_key_heads, weights.eps,
            conv_state, state, rows.state_ids, out, batch_rows(rows.batch), kept,
            weights.output_gate == "sigmoid",
        )  # fmt: skip
        return out

    def commit_attention(self, caches: Sequence[tuple[Array, ...]], path: CommittedPath) -> None:
        sources = path.sources[: self._num_rows_of(path)]
        for k_cache, v_cache, *others in caches:
            for pair in ((k_cache, v_cache), *((cache, None) for cache in others)):
                _csrc.commit_attention(self._runtime, *pair, path.first, sources, path.table)

    def commit_delta_net(self, layers: Sequence[RecurrentLayer], path: CommittedPath) -> None:
        kept_ids = path.kept[: self._num_rows_of(path)]
        for layer in layers:
            weights, kept, state = layer.weights, layer.kept, layer.state
            out = self._empty(len(kept_ids), state.shape[1] * state.shape[-1])
            _csrc.commit_delta_net(
                self._runtime, kept.qkv, kept.alpha, kept.beta, weights.conv_taps, weights.a, weights.dt_bias,
                weights.norm, weights.key_head_ids, weights.num_key_heads, weights.eps, layer.conv_state,
                state, path.state_id, kept_ids, out,
            )  # fmt: skip

    def _num_rows_of(self, path: CommittedPath) -> int:
        """A captured commit is run with the rows of each path."""
        return len(path.sources) if self._arena is not None else int(path.count[0])

    def choose_experts(self, x: Array, weights: RouterWeights) -> tuple[Array, Array]:
        ids = self._empty_ids(x.shape[0], weights.num_experts_per_tok)
        topk_weights = self._empty(x.shape[0], weights.num_experts_per_tok)
        _csrc.router(self._runtime, x, weights.gate, ids, topk_weights, weights.rule)
        return ids, topk_weights

    def _empty_ids(self, num_rows: int, num_experts_per_tok: int) -> Array:
        return self._empty(num_rows, num_experts_per_tok, dtype=np.dtype(np.int32))

    def top_log_probs(self, logits: Array, k: int) -> tuple[Array, Array]:
        """The k greatest of each row of float32 logits [T, V], of equal ones the lowest ids first.

        int32 ids and float32 log-probabilities [T, k], of a softmax over the row; these are NaN unless all
        logits are finite. For drafts: the bits depend on the tier.
        """
        shape = logits.shape[0], min(k, logits.shape[1])
        ids, log_probs = self._empty(*shape, dtype=np.dtype(np.int32)), self._empty(*shape)
        _csrc.top_log_probs(self._runtime, logits, ids, log_probs)
        return ids, log_probs

    def routed_experts(self, x: Array, topk_ids: Array, weights: ExpertWeights) -> Array:
        out = self._empty(*topk_ids.shape, weights.down.num_rows)
        stacks = weights.gate, weights.up, weights.down
        glu = expert_glu(weights.activation, weights.biases)
        _csrc.routed_experts(self._runtime, x, topk_ids, *stacks, out, glu)
        return out

    def combine_experts(
        self,
        routed: Array,
        topk_weights: Array,
        shared: Array | None,
        shared_gate: Array | None,
        bias: tuple[Array, Array] | None = None,
    ) -> Array:
        out = self._empty(routed.shape[0], routed.shape[2])
        _csrc.combine_experts(self._runtime, routed, topk_weights, shared, shared_gate, out, *(bias or ()))
        return out


def expert_glu(activation: Activation, biases: ExpertBiases | None) -> _csrc.ExpertGlu:
    """What the CPU's kernels do between an expert's products, with arrays that they keep."""
    of_gate_and_up = () if biases is None else biases.on_host
    return _csrc.ExpertGlu(activation.number, activation.limit, *of_gate_and_up)


class UnreadCpuOps(CpuOps):
    """`CpuOps` that read no weights, to count the memory of a captured forward pass without running it."""

    _ngram_cache_bytes = 0

    def load_weight(self, file: GGUFFile, info: TensorInfo) -> _csrc.Weight:
        return self.map_weight(file, info)

    def load_rows(self, file: GGUFFile, info: TensorInfo, row_ids: Sequence[int]) -> _csrc.Weight:
        """`len(row_ids)` rows from the first one on, in place of the named ones."""
        return self.map_weight(file, info).rows(0, len(row_ids))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Not written, as nothing reads it: caches may be gigabytes."""
        return np.empty(shape, dtype)


def batch_rows(rows: BatchRows | None) -> _csrc.BatchRows | None:
    """The rows as an argument of kernels; the arrays are not copied."""
    if rows is None:
        return None
    return _csrc.BatchRows(rows.segments, rows.tables, rows.indices, rows.parents, rows.kept)


class RoutingCpuOps(CpuOps):
    """`CpuOps` that keep the choices of routers.

    Each call of a router appends its ids, int32 [T, K], to `topk_ids`. They have memory of their own, so that
    after a run of a captured graph they are those of that run.
    """

    def __init__(self, threads: int, tier: str = "auto") -> None:
        super().__init__(threads, tier)
        self.topk_ids: list[Array] = []

    def choose_experts(self, x: Array, weights: RouterWeights) -> tuple[Array, Array]:
        ids, topk_weights = super().choose_experts(x, weights)
        self.topk_ids.append(ids)
        return ids, topk_weights

    def _empty_ids(self, num_rows: int, num_experts_per_tok: int) -> Array:
        """Not from the arena, where arrays that are never freed would each keep a larger block from reuse."""
        return np.empty((num_rows, num_experts_per_tok), np.int32)


class UnreadRoutingCpuOps(UnreadCpuOps, RoutingCpuOps):
    """`UnreadCpuOps` for `RoutingCpuOps`: choices that are kept need memory of their own."""
