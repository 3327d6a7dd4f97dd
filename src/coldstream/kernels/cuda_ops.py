"""The operations on a GPU: `ops.py` has their meaning, `docs/arithmetic.md` their bits.

GEMV, skinny and GEMM kernels compute the same bits; everything runs on the
current stream and can be captured into a CUDA graph.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.arithmetic.quantised import GROUP_SIZE
from coldstream.kernels.attention.arguments import (
    AttentionShape,
    DecodeWorkspace,
    IntegerQueries,
)
from coldstream.kernels.attention.chunks import CHUNK_SIZE
from coldstream.kernels.attention.cuda import IntegerKernels, attention_cuda
from coldstream.kernels.attention.move_rows import move_rows_cuda
from coldstream.kernels.attention.workspace_sizes import rows_at_once
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.contents import write
from coldstream.kernels.cuda.copy_values import copy_values_cuda
from coldstream.kernels.cuda.loader import CudaWeight
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.cuda.skinny_shapes import GROUP_TYPES
from coldstream.kernels.embed.cuda import embed_cuda
from coldstream.kernels.experts.executor import (
    Executor,
    ExecutorFactory,
    ModelExecutor,
    ResidentExecutor,
    made_executor,
)
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.gated_delta_net import cuda as delta_net
from coldstream.kernels.gated_delta_net.arguments import PrefillWorkspace
from coldstream.kernels.gated_delta_net.cuda import (
    arrival_count,
    delta_net_decode_cuda,
    delta_net_prefill_cuda,
    delta_net_replay_cuda,
)
from coldstream.kernels.hyper_connections.cuda import (
    inject_norm_cuda,
    low_rank_cuda,
    mix_streams_cuda,
    scaled_silu_cuda,
)
from coldstream.kernels.indexer.cuda import IndexerWorkspace, choose_blocks_cuda
from coldstream.kernels.indexer.records import ChosenBlocks, IndexerHeads, IndexerInputs
from coldstream.kernels.indexer.workspace_sizes import rows_at_once as scored_at_once
from coldstream.kernels.linear.add_bias import add_bias_cuda
from coldstream.kernels.linear.records import BiasedOutput
from coldstream.kernels.ngram.cuda_ops import CudaNgrams
from coldstream.kernels.ops import (
    BLOCK_POSITIONS,
    AttentionHeads,
    AttentionInputs,
    Caches,
    CommittedPath,
    DeltaNetInputs,
    DeltaNetWeights,
    ExpertOutputs,
    ExpertWeights,
    FfnWeights,
    PostNorms,
    RecurrentLayer,
    RopeSpec,
    RouterWeights,
    Routing,
    Rows,
)
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.rms_norm.cuda import (
    add_post_norm_cuda,
    add_rms_norm_cuda,
    rms_norm_cuda,
    rms_norm_pair_cuda,
)
from coldstream.kernels.rope.cuda import gather_angles_cuda
from coldstream.kernels.router.cuda import NormBefore
from coldstream.kernels.scalars.cuda import scale_cuda, softcap_cuda
from coldstream.kernels.top_log_probs.cuda import top_log_probs_cuda, workspace_bytes

# Each block of a router's launch norms all rows, so that with more of them a launch of its own is faster.
MAX_NORMED_ROWS = 2
MOST_THREADS = 8  # for the table of angles


class CudaOps(CudaNgrams):
    """`Ops` on the current CUDA device, over tensors of `memory`, see `CudaProducts` and `CudaNgrams`.

    max_positions bounds the positions that `rope_angles` is asked for, max_rows the rows of a step.
    make_executor makes the executor that decides where stacks of experts lie, and computes them unless `own`
    makes another one. Raises ConfigError as `made_executor` does.
    """

    def __init__(
        self,
        memory: Memory,
        max_positions: int,
        max_rows: int,
        make_executor: Callable[[MoeKernels], ModelExecutor] = ResidentExecutor,
        *,
        own: ExecutorFactory | None = None,
        notes_kernels: bool = False,
        has_host_tables: bool = False,
    ) -> None:
        super().__init__(memory, max_rows, notes_kernels=notes_kernels, has_host_tables=has_host_tables)
        self._max_positions = max_positions
        self._rope_tables: dict[RopeSpec, DeviceArray] = {}
        # Weakly: in a cycle, device memory would stay until the next garbage collection.
        kernels = MoeKernels(weakref.proxy(self))
        self.model_executor = make_executor(kernels)
        self.executor: Executor = self.model_executor
        if own is not None:
            self.executor = made_executor(own, self.model_executor, kernels)

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> CudaWeight:
        if len(info.shape) < 3:
            return self.load_table(file, info)
        stack = self.model_executor.map_stack(file, info)
        return self.load_weight(file, info) if stack is None else stack

    def load_ffn_weight(self, file: GGUFFile, info: TensorInfo) -> CudaWeight:
        table = self.model_executor.map_matrix(file, info)
        return self.load_weight(file, info) if table is None else table

    def ffn(self, x: Activations, weights: FfnWeights) -> DeviceArray | ExpertOutputs:
        return self.model_executor.ffn(x, weights)

    def embed(self, table: CudaWeight, token_ids: DeviceArray) -> DeviceArray:
        assert isinstance(table, QuantTensor)
        out = self.empty(len(token_ids), table.shape[1])
        self.launch(embed_cuda, table, token_ids, out)
        return out

    def rms_norm(self, x: DeviceArray, weight: DeviceArray, eps: float) -> Activations:
        out = self.activations(*x.shape)
        self.launch(rms_norm_cuda, x, weight, eps, out.values, out.quantised)
        return out

    def rms_norm_pair(
        self, x: DeviceArray, x_weight: DeviceArray, y: DeviceArray, y_weight: DeviceArray, eps: float
    ) -> Activations:
        size = x.shape[1]
        out = self.activations(x.shape[0], 2 * size)
        if size % GROUP_SIZE == 0:
            self.launch(rms_norm_pair_cuda, x, x_weight, y, y_weight, eps, out.values, out.quantised)
            return out
        # A group has values of both, so that neither norm can quantise it.
        halves = out.values[:, :size], out.values[:, size:]
        for half, rows, weight in zip(halves, (x, y), (x_weight, y_weight), strict=True):
            normed = self.empty(*x.shape)  # the kernel writes whole rows
            self.launch(rms_norm_cuda, rows, weight, eps, normed, None)
            self.launch(copy_values_cuda, normed, half)
        self.launch(quantize_cuda, out.values, out.quantised)
        return out

    def add_norm(
        self,
        x: DeviceArray,
        update: DeviceArray | ExpertOutputs | BiasedOutput,
        weight: DeviceArray,
        eps: float,
        *,
        for_router: bool = False,
    ) -> tuple[DeviceArray, Activations]:
        total, out = self.empty(*x.shape), self.activations(*x.shape)
        is_small = x.shape[0] <= MAX_NORMED_ROWS and NormBefore.is_supported(*x.shape)
        if for_router and is_small and not isinstance(update, ExpertOutputs):
            # It keeps x and the update alive: the router's launch reads them while it writes its results.
            added, bias = (update.values, update.bias) if isinstance(update, BiasedOutput) else (update, None)
            before = NormBefore(x, added, total, weight, eps, out.quantised, bias)
            return total, replace(out, before=before)
        self.launch(add_rms_norm_cuda, x, update, total, weight, eps, out.values, out.quantised)
        return total, out

    def add_post_norm(
        self,
        x: DeviceArray,
        update: DeviceArray | ExpertOutputs,
        post: PostNorms,
        weight: DeviceArray,
        eps: float,
    ) -> tuple[DeviceArray, Activations]:
        total, out = self.empty(*x.shape), self.activations(*x.shape)
        self.launch(add_post_norm_cuda, x, update, post, total, weight, eps, out.values, out.quantised)
        return total, out

    def inject_norm(
        self,
        streams: DeviceArray | None,
        update: DeviceArray | ExpertOutputs,
        injection: DeviceArray | None,
        weight: DeviceArray,
        eps: float,
    ) -> tuple[DeviceArray, Activations]:
        rows = len(update.routed) if isinstance(update, ExpertOutputs) else len(update)
        total, out = self.empty(rows, weight.numel()), self.activations(rows, weight.numel())
        self.launch(
            inject_norm_cuda, streams, update, injection, total, weight, eps, out.values, out.quantised
        )
        return total, out

    def stream_gates(
        self, x: Activations, low: Sequence[CudaWeight], up: CudaWeight, divisor: int
    ) -> tuple[DeviceArray, tuple[DeviceArray, ...]]:
        matrices = [weight for weight in low if isinstance(weight, QuantTensor)]
        assert isinstance(up, QuantTensor), "experts are no operand of a dense product"
        opened = self.activations(x.shape[0], matrices[0].shape[0])
        if x.shape[0] == 1 and up.quant_type not in GROUP_TYPES:
            outs = tuple(self.empty(1, weight.shape[0]) for weight in matrices)
            self.launch(low_rank_cuda, matrices, x.values, x.quantised, outs, divisor, opened)
        else:
            outs = self.linear(x, low)
            self.launch(scaled_silu_cuda, outs[0], divisor, opened.values, opened.quantised)
        (gates,) = self.linear(opened, (up,))
        return gates, outs[1:]

    def mix_streams(self, normed: Activations, gates: DeviceArray, num_streams: int) -> Activations:
        out = self.activations(normed.shape[0], normed.shape[1] // num_streams)
        self.launch(mix_streams_cuda, normed.values, gates, out.values, out.quantised)
        return out

    def project_streams(
        self, x: DeviceArray, norm: DeviceArray, eps: float, weight: QuantTensor, num_streams: int
    ) -> DeviceArray:
        rows, width = x.shape
        streams = self.activations(rows * num_streams, width // num_streams)
        self.launch(rms_norm_cuda, x, norm, eps, streams.values.reshape(rows, width), None)
        self.launch(quantize_cuda, streams.values, streams.quantised)
        (out,) = self.linear(streams, (weight,))
        return out.reshape(rows, -1)

    def add_bias(self, x: DeviceArray, bias: DeviceArray) -> DeviceArray:
        self.launch(add_bias_cuda, x, bias)
        return x

    def scale(self, x: DeviceArray, factor: float) -> DeviceArray:
        self.launch(scale_cuda, x, factor)
        return x

    def softcap(self, x: DeviceArray, cap: float) -> DeviceArray:
        self.launch(softcap_cuda, x, cap)
        return x

    def rope_angles(self, positions: DeviceArray, rope: RopeSpec) -> DeviceArray:
        if rope not in self._rope_tables:
            self._rope_tables[rope] = self._rope_table(rope)
        out = self.empty(len(positions), rope.num_dims // 2, 2)
        self.launch(gather_angles_cuda, self._rope_tables[rope], positions, out)
        return out

    def _rope_table(self, rope: RopeSpec) -> DeviceArray:
        """The angles of all positions, computed on the CPU so that they are the same on every device."""
        table = self.memory.persistent((self._max_positions, rope.num_dims // 2, 2), "float32")
        if not self.planning:
            on_host = CpuOps(min(MOST_THREADS, len(os.sched_getaffinity(0))))
            positions = np.arange(self._max_positions, dtype=np.int32)
            write(table, on_host.rope_angles(positions, rope))
        return table

    def attention(
        self, inputs: AttentionInputs, heads: AttentionHeads, caches: Caches, rows: Rows
    ) -> Activations:
        assert rows.batch is not None, "a step's rows lie in blocks"
        shape = AttentionShape.of(inputs, heads, caches)
        num_rows, num_heads, head_dim = len(inputs.key), shape.num_heads, shape.head_dim
        queries = IntegerQueries(
            self.empty(num_rows, num_heads, 2, head_dim, dtype="int8"),
            self.empty(num_rows, num_heads),
            inputs.chosen,
        )
        out = self.activations(num_rows, num_heads * head_dim)
        num_positions = rows.batch.tables.shape[1] * caches.k.shape[1]
        at_once = rows_at_once(num_rows, is_deep=rows.batch.is_deep, has_trees=rows.batch.has_trees)
        num_chunks = IntegerKernels.num_chunks(at_once, num_positions)
        values, stats = DecodeWorkspace.shapes(shape, at_once, num_chunks * CHUNK_SIZE)
        workspace = DecodeWorkspace(self.empty(*values), self.empty(*stats))
        self.launch(attention_cuda, shape, inputs, heads, caches, rows, queries, workspace, out)
        return out

    def gated_delta_net(
        self, inputs: DeltaNetInputs, weights: DeltaNetWeights, conv_state: DeviceArray, state: DeviceArray
    ) -> Activations:
        rows = inputs.rows
        assert rows.batch is not None, "a step's rows lie in blocks"
        num_rows, width = inputs.z.shape
        out = self.activations(num_rows, width)
        operands = (inputs, weights, conv_state, state, out.values, out.quantised)
        # In place of a prompt's: a warp reads what it writes. It is as large as the other activations there.
        raw = out.values if rows.batch.has_prompts else self.empty(num_rows, width)
        if rows.batch.has_prompts:
            workspace = PrefillWorkspace(
                self.empty(num_rows, inputs.qkv.shape[1] - width),
                self.empty(num_rows, width),
                self.empty(num_rows, *inputs.alpha.shape[1:], 2),
                raw,
                self.zeroed("spans", state.shape[0], 2)[: None if rows.batch.has_several else 1],
            )
            self.launch(delta_net_prefill_cuda, *operands, workspace)
        if rows.batch.has_trees or not rows.batch.has_prompts:
            count = arrival_count(self._max_rows, weights.num_key_heads, width)
            between = delta_net.DecodeWorkspace(raw, self.zeroed("delta net", count))
            self.launch(delta_net_decode_cuda, *operands, between, computes_chains=not rows.batch.has_prompts)
        return out

    def choose_blocks(
        self, inputs: IndexerInputs, heads: IndexerHeads, cache: DeviceArray, rows: Rows
    ) -> ChosenBlocks:
        assert rows.batch is not None, "a step's rows lie in blocks"
        num_rows, head_dim = inputs.key.shape
        length = rows.batch.tables.shape[1] * BLOCK_POSITIONS
        num_blocks = length // heads.block_size
        workspace = IndexerWorkspace(
            self.empty(num_rows, inputs.query.shape[1] // head_dim, head_dim),
            self.empty(scored_at_once(num_rows, num_blocks), num_blocks),
        )
        words = self.empty(num_rows, heads.num_words(length), dtype="int32")
        self.launch(choose_blocks_cuda, inputs, heads, cache, rows, workspace, words)
        return ChosenBlocks(words, heads.block_size)

    def commit_attention(self, caches: Sequence[tuple[DeviceArray, ...]], path: CommittedPath) -> None:
        self.launch(move_rows_cuda, caches, path)

    def commit_delta_net(self, layers: Sequence[RecurrentLayer], path: CommittedPath) -> None:
        readers = self.zeroed("delta net replay", len(layers), layers[0].weights.num_key_heads)
        self.launch(delta_net_replay_cuda, layers, path, readers)

    def router(
        self,
        x: Activations,
        weights: RouterWeights,
        experts: ExpertWeights,
        residual: DeviceArray | None = None,
    ) -> Routing:
        norm, has_own = x.before, weights.input_norm is not None
        is_ours = self.executor is self.model_executor
        if norm is not None and is_ours and MoeKernels.routes_at_once(x.shape[0], weights.shared_gate):
            assert not has_own or norm.eps == weights.eps, "one norm with two weights"
            x = replace(x, before=replace(norm, is_unweighted=has_own))
            return self.executor.route(x, weights, experts)
        if norm is not None:
            x = replace(x, before=None)
            self.launch(
                add_rms_norm_cuda,
                norm.x,
                norm.update if norm.bias is None else BiasedOutput(norm.update, norm.bias),
                norm.total,
                norm.weight,
                norm.eps,
                x.values,
                x.quantised,
            )
        if has_own:
            own = self.empty(*x.shape)
            self.launch(rms_norm_cuda, residual, weights.input_norm, weights.eps, own, None)
            x = replace(x, for_router=own)
        return self.executor.route(x, weights, experts)

    def experts(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        return self.executor.compute(x, routing, weights)

    def top_log_probs(self, logits: DeviceArray, k: int) -> tuple[DeviceArray, DeviceArray]:
        """See `top_log_probs_cuda`: int32 ids and float32 log-probabilities [T, k]."""
        rows = logits.shape[0]
        ids, log_probs = self.empty(rows, k, dtype="int32"), self.empty(rows, k)
        self.top_log_probs_into(logits, ids, log_probs)
        return ids, log_probs

    def top_log_probs_into(self, logits: DeviceArray, ids: DeviceArray, log_probs: DeviceArray) -> None:
        """As `top_log_probs`, into contiguous int32 ids and float32 log_probs [T, k]."""
        rows, vocab = logits.shape
        parts = self.empty(workspace_bytes(rows, vocab, ids.shape[1]), dtype="uint8")
        arrivals = self.zeroed("top log probs", rows)
        self.launch(top_log_probs_cuda, logits, parts, arrivals, ids, log_probs)

    def start_step(self, rows: Rows) -> None:
        """Call before the first operation of a step of `rows`, of which those of no sequence come last."""
        self.memory.start_step()
        self.step_positions = rows.positions

    def finish_step(self) -> None:
        """Call after the last operation of a step."""
        self.model_executor.finish_step()
