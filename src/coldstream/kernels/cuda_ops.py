"""The operations on a GPU: `ops.py` has their meaning, `docs/arithmetic.md` their bits.

Few rows and many rows have kernels of their own that compute the same bits; everything runs on PyTorch's
current stream and can be captured into a CUDA graph. Activations between two operations exist in two forms,
float32 and quantised with a scale for each 256; whoever makes them writes both. Products with weights in
blocks of 32 want a scale for each 32: they quantise the floats themselves, or, of many rows, just before.
"""

from collections.abc import Callable, Sequence

import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import BLOCK_SIZE, GROUP_SIZE, QuantActivations
from coldstream.kernels.attention.arguments import (
    AttentionInputs,
    AttentionShape,
    Caches,
    DecodeWorkspace,
    IntegerQueries,
)
from coldstream.kernels.attention.cache_types import CacheType
from coldstream.kernels.attention.cuda import IntegerKernels, attention_cuda
from coldstream.kernels.attention.exact import CHUNK_SIZE
from coldstream.kernels.attention.move_rows import move_rows_cuda
from coldstream.kernels.cuda.activations import Activations, as_floats
from coldstream.kernels.cuda.few_shapes import FEW_TYPES
from coldstream.kernels.cuda.few_shapes import MAX_ROWS as MAX_FEW_ROWS
from coldstream.kernels.cuda.loader import CudaLoader, CudaWeight
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.dequantize.cuda import dequantize_cuda, dequantize_matrices_cuda
from coldstream.kernels.embed.cuda import embed_cuda
from coldstream.kernels.experts.cuda import PairRows
from coldstream.kernels.experts.cuda_layer import (
    all_experts_few,
    down_many,
    experts_of_values,
    gate_up_many,
    is_one_launch,
)
from coldstream.kernels.experts.cuda_many import Groups, max_tiles
from coldstream.kernels.experts.partition import Sharing, partition_experts_cuda
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.gated_delta_net import cuda as delta_net
from coldstream.kernels.gated_delta_net.arguments import DeltaNetInputs, PrefillWorkspace
from coldstream.kernels.gated_delta_net.cuda import (
    arrival_count,
    delta_net_decode_cuda,
    delta_net_prefill_cuda,
    delta_net_replay_cuda,
)
from coldstream.kernels.linear.cuda import linear_few_cuda
from coldstream.kernels.linear.cuda_float_many import float_linear_many
from coldstream.kernels.linear.cuda_many import linear_many
from coldstream.kernels.linear.reference import BLOCK_TYPES, INTEGER_TYPES, activation_scale_size
from coldstream.kernels.ops import (
    CommittedPath,
    DeltaNetWeights,
    ExpertOutputs,
    ExpertWeights,
    KeptInputs,
    RopeSpec,
    Routing,
    Rows,
)
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import activations_from, quantize_cuda
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda, rms_norm_cuda
from coldstream.kernels.rope.cuda import gather_angles_cuda
from coldstream.kernels.rope.reference import rope_angles
from coldstream.kernels.router.cuda import Ahead, router_choose_cuda, router_few_cuda
from coldstream.kernels.swiglu.cuda import swiglu_cuda


class CudaOps(CudaLoader):
    """`Ops` on the current CUDA device, over tensors of `memory`.

    max_positions bounds the positions that `rope_angles` is asked for, max_rows the rows of a step. Over a
    `MemoryPlan` nothing runs; with `notes_kernels` launchers are called there all the same, so that
    `note_kernels` sees what they choose.
    """

    def __init__(
        self, memory: Memory, max_positions: int, max_rows: int, *, notes_kernels: bool = False
    ) -> None:
        super().__init__(memory)
        self._max_rows = max_rows
        self._calls_launchers = notes_kernels or not self.planning
        self._max_positions = max_positions
        self._rope_tables: dict[RopeSpec, torch.Tensor] = {}
        self._zeroes: dict[tuple[str | int, ...], torch.Tensor] = {}

    def embed(self, table: CudaWeight, token_ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(table, QuantTensor)
        out = self._empty(len(token_ids), table.shape[1])
        self._launch(embed_cuda, table, token_ids, out, self.code_table(table.quant_type))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Activations:
        out = self.activations(*x.shape)
        self._launch(rms_norm_cuda, x, weight, eps, out.values, out.quantised)
        return out

    def add_norm(
        self, x: torch.Tensor, update: torch.Tensor | ExpertOutputs, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, Activations]:
        total, out = self._empty(*x.shape), self.activations(*x.shape)
        self._launch(add_rms_norm_cuda, x, update, total, weight, eps, out.values, out.quantised)
        return total, out

    def linear(self, x: Activations, weights: Sequence[CudaWeight]) -> tuple[torch.Tensor, ...]:
        matrices = [self._multipliable(weight) for weight in weights]
        num_rows = x.shape[0]
        outs = tuple(self._empty(num_rows, weight.shape[0]) for weight in matrices)
        if num_rows <= MAX_FEW_ROWS:
            self._launch(self._linear_few, x, matrices, outs)
            return outs
        rows = self._quantised_for(x, [weight.quant_type for weight in matrices])
        for codes, weight, out in zip(rows, matrices, outs, strict=True):
            if weight.quant_type in INTEGER_TYPES:
                self._launch(linear_many, codes, weight, out)
            else:
                self._launch(float_linear_many, x.values, weight, out)
        return outs

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> Activations:
        out = self.activations(*gate.shape)
        self._launch(swiglu_cuda, gate, up, out.values, out.quantised)
        return out

    def rope_angles(self, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
        if rope not in self._rope_tables:
            self._rope_tables[rope] = self._rope_table(rope)
        out = self._empty(len(positions), rope.num_dims // 2, 2)
        self._launch(gather_angles_cuda, self._rope_tables[rope], positions, out)
        return out

    def _rope_table(self, rope: RopeSpec) -> torch.Tensor:
        """The angles of all positions, computed on the CPU so that they are the same on every device."""
        table = self.memory.persistent((self._max_positions, rope.num_dims // 2, 2), torch.float32)
        if not self.planning:
            table.copy_(rope_angles(torch.arange(self._max_positions, dtype=torch.int32), rope))
        return table

    def attention(
        self,
        query_gate: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        angles: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: Rows,
        *,
        output_gate: bool,
        window: int | None,
    ) -> Activations:
        assert rows.batch is not None, "a step's rows lie in blocks"
        num_rows, head_dim = key.shape[0], q_norm.shape[0]
        num_heads = query_gate.shape[1] // (2 * head_dim if output_gate else head_dim)
        shape = AttentionShape(num_heads, k_cache.shape[2], head_dim, CacheType.of(k_cache, head_dim), window)
        queries = IntegerQueries(
            self._empty(num_rows, num_heads, 2, head_dim, dtype=torch.int8), self._empty(num_rows, num_heads)
        )
        out = self.activations(num_rows, num_heads * head_dim)
        num_positions = rows.batch.tables.shape[1] * k_cache.shape[1]
        num_chunks = IntegerKernels.num_chunks(num_rows, num_positions)
        values, stats = DecodeWorkspace.shapes(shape, num_rows, num_chunks * CHUNK_SIZE)
        workspace = DecodeWorkspace(self._empty(*values), self._empty(*stats))
        inputs = AttentionInputs(query_gate, key, value, q_norm, k_norm, angles, eps)
        self._launch(attention_cuda, shape, inputs, Caches(k_cache, v_cache), rows, queries, workspace, out)
        return out

    def gated_delta_net(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        weights: DeltaNetWeights,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        rows: Rows,
    ) -> Activations:
        assert rows.batch is not None, "a step's rows lie in blocks"
        num_rows, width = z.shape
        out = self.activations(num_rows, width)
        inputs = DeltaNetInputs(qkv, z, alpha, beta, rows)
        operands = (inputs, weights, conv_state, state, out.values, out.quantised)
        raw = self._empty(num_rows, width)
        if rows.batch.has_prompts:
            workspace = PrefillWorkspace(
                self._empty(num_rows, qkv.shape[1] - width),
                self._empty(num_rows, width),
                self._empty(num_rows, *alpha.shape[1:], 2),
                raw,
                self._zeroed("spans", state.shape[0], 2),
            )
            self._launch(delta_net_prefill_cuda, *operands, workspace)
        if rows.batch.has_trees or not rows.batch.has_prompts:
            count = arrival_count(self._max_rows, weights.num_key_heads, width)
            few = delta_net.DecodeWorkspace(raw, self._zeroed("delta net", count))
            self._launch(delta_net_decode_cuda, *operands, few, computes_chains=not rows.batch.has_prompts)
        return out

    def commit_attention(self, k_cache: torch.Tensor, v_cache: torch.Tensor, path: CommittedPath) -> None:
        self._launch(move_rows_cuda, k_cache, v_cache, path)

    def commit_delta_net(
        self,
        weights: DeltaNetWeights,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        kept: KeptInputs,
        path: CommittedPath,
    ) -> None:
        readers = self._zeroed("delta net replay", weights.num_key_heads)
        self._launch(delta_net_replay_cuda, weights, conv_state, state, kept, path, readers)

    def router(
        self,
        x: Activations,
        weight: CudaWeight,
        shared_gate: CudaWeight,
        num_experts_per_tok: int,
        experts: ExpertWeights,
    ) -> Routing:
        return self.route(x, weight, shared_gate, num_experts_per_tok, None)

    @staticmethod
    def routes_at_once(num_rows: int, shared_gate: CudaWeight) -> bool:
        """Whether `route` is a single launch, which may also look `ahead`."""
        assert isinstance(shared_gate, QuantTensor)
        return num_rows <= MAX_FEW_ROWS and shared_gate.quant_type == QuantType.F32

    def route(
        self,
        x: Activations,
        weight: CudaWeight,
        shared_gate: CudaWeight,
        num_experts_per_tok: int,
        sharing: Sharing | None,
        ahead: Ahead | None = None,
    ) -> Routing:
        """`router`; what it chooses is shared out at once if `sharing` says how."""
        assert isinstance(weight, QuantTensor)
        assert isinstance(shared_gate, QuantTensor)
        num_rows, num_experts = x.shape[0], weight.shape[0]
        ids = self._empty(num_rows, num_experts_per_tok, dtype=torch.int32)
        weights = self._empty(num_rows, num_experts_per_tok)
        if not self.routes_at_once(num_rows, shared_gate):
            logits, gate = self.linear(x, (weight, shared_gate))
            self._launch(router_choose_cuda, logits, ids, weights)
            if sharing is not None:
                self._launch(partition_experts_cuda, ids, x.values, sharing)
            return Routing(ids, weights, gate)
        gate, logits = self._empty(num_rows, 1), self._empty(num_rows, num_experts)
        self._launch(
            router_few_cuda, x.values, as_floats(weight), as_floats(shared_gate), ids, weights, gate, logits,
            self._zeroed("router", 1), sharing, ahead,
        )  # fmt: skip
        return Routing(ids, weights, gate)

    def finish_step(self) -> None:
        """After the last operation of a step: what runs beside the current stream is waited for there."""

    def experts(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        tokens, ranks = routing.ids.shape
        routed = self._empty(tokens, ranks, x.shape[1])
        stacks = (weights.gate, weights.up, weights.down)
        is_readable = all(stack.quant_type in FEW_TYPES for stack in stacks)
        if tokens <= MAX_FEW_ROWS and is_readable and is_one_launch(weights):
            shared = self._empty(*x.shape)
            self._few_experts(x, routing.ids, weights, routed, shared)
            return ExpertOutputs(routed, shared, routing)
        gate, up = self.linear(x, (weights.shared_gate, weights.shared_up))
        (shared,) = self.linear(self.swiglu(gate, up), (weights.shared_down,))
        del gate, up
        if not is_readable:
            self._experts_as_floats(x, routing.ids, stacks, routed)
        elif tokens > MAX_FEW_ROWS and all(stack.quant_type in INTEGER_TYPES for stack in stacks):
            self._routed_many(x, routing.ids, weights, routed)
        else:
            for first in range(0, tokens, MAX_FEW_ROWS):
                part = slice(first, min(first + MAX_FEW_ROWS, tokens))
                rows = x.rows(first, part.stop - first)
                self._few_experts(rows, routing.ids[part], weights, routed[part], None)
        return ExpertOutputs(routed, shared, routing)

    def _few_experts(
        self,
        x: Activations,
        ids: torch.Tensor,
        weights: ExpertWeights,
        routed: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> None:
        """Of at most MAX_FEW_ROWS tokens; the shared expert too if there is a place for its outputs."""
        hidden = PairRows(
            self._empty(*ids.shape, weights.gate.rows),
            None if shared is None else self._empty(len(ids), weights.shared_gate.shape[0]),
        )
        self._launch(all_experts_few, x, ids, weights, hidden, PairRows(routed, shared))

    def _experts_as_floats(
        self, x: Activations, ids: torch.Tensor, stacks: Sequence[ExpertTable], routed: torch.Tensor
    ) -> None:
        """Types without products of their own: each token's experts as float32, one token after the other."""
        tokens, ranks = ids.shape
        values = [self._empty(ranks, stack.rows, stack.cols) for stack in stacks]
        addresses = [self._empty(ranks, dtype=torch.int64) for _ in stacks]
        there = self._empty(ranks, dtype=torch.int64)
        places = self._empty(1, ranks, dtype=torch.int32)
        hidden = PairRows(self._empty(1, ranks, stacks[0].rows), None)
        codes = [self.code_table(stack.quant_type) for stack in stacks]
        for token in range(tokens):
            part = slice(token, token + 1)
            for stack, code, matrices in zip(stacks, codes, values, strict=True):
                if stack.quant_type not in FEW_TYPES:
                    self._launch(
                        dequantize_matrices_cuda,
                        stack.quant_type,
                        stack.addresses,
                        ids[token],
                        matrices,
                        code,
                    )
            self._launch(
                experts_of_values, x.rows(token, 1), ids[part], stacks, values, addresses, there, places,
                hidden, routed[part],
            )  # fmt: skip

    def _routed_many(
        self, x: Activations, ids: torch.Tensor, weights: ExpertWeights, routed: torch.Tensor
    ) -> None:
        gate, up, down = weights.gate, weights.up, weights.down
        num_pairs, num_experts, ffn_size = ids.numel(), len(gate.addresses), gate.rows
        groups = Groups(
            self._empty(num_pairs, dtype=torch.int32),
            self._empty(num_pairs, dtype=torch.int32),
            self._empty(num_experts, 2, dtype=torch.int32),
            self._empty(max_tiles(num_pairs, num_experts) + 1, 4, dtype=torch.int32),
        )
        stacks = (gate, up, down)
        rows = self._quantised_for(x, (gate.quant_type, up.quant_type))
        hidden = self.activations(num_pairs, ffn_size, scale_size=activation_scale_size(down.quant_type))
        if gate.quant_type == up.quant_type:
            self._launch(gate_up_many, rows, ids, stacks, groups, (hidden.values,))
            self._launch(quantize_cuda, hidden.values, hidden.quantised)
        else:
            halves = (self._empty(num_pairs, ffn_size), self._empty(num_pairs, ffn_size))
            self._launch(gate_up_many, rows, ids, stacks, groups, halves)
            self._launch(swiglu_cuda, *halves, hidden.values, hidden.quantised)
        self._launch(down_many, hidden.quantised, ids, stacks, groups, routed)

    def _quantised_for(self, x: Activations, types: Sequence[QuantType]) -> tuple[QuantActivations, ...]:
        """x as products of many rows with weights of these types read it; for blocks of 32 quantised here."""
        if BLOCK_TYPES.isdisjoint(types):
            return (x.quantised,) * len(types)
        by_block = activations_from(self.memory.workspace, x.shape[0], x.shape[1], BLOCK_SIZE)
        self._launch(quantize_cuda, x.values, by_block)
        return tuple(by_block if quant_type in BLOCK_TYPES else x.quantised for quant_type in types)

    def _linear_few(
        self, x: Activations, weights: Sequence[QuantTensor], outs: Sequence[torch.Tensor]
    ) -> None:
        linear_few_cuda(weights, outs, activations=x.quantised, x=x.values)

    def _multipliable(self, weight: CudaWeight) -> QuantTensor:
        """The weight itself, or its values as float32 if the products have no kernel for its type."""
        assert isinstance(weight, QuantTensor)
        if weight.quant_type in FEW_TYPES:
            return weight
        values = self._empty(*weight.shape)
        self._launch(dequantize_cuda, weight, values, self.code_table(weight.quant_type), None)
        return QuantTensor.from_bytes(values.view(torch.uint8), QuantType.F32, weight.shape)

    def _zeroed(self, purpose: str, *shape: int) -> torch.Tensor:
        """int32 zeros that kernels count in and leave zero: one tensor for all launches of a purpose."""
        key: tuple[str | int, ...] = (purpose, *shape)
        if key not in self._zeroes:
            self._zeroes[key] = self.zeros(shape, "int32")
        return self._zeroes[key]

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.memory.workspace(shape, dtype)

    def activations(
        self, rows: int, cols: int, *, persistent: bool = False, scale_size: int = GROUP_SIZE
    ) -> Activations:
        """Unwritten activations [rows, cols], with a scale for each `scale_size` of them."""
        empty = self.memory.persistent if persistent else self.memory.workspace
        quantised = activations_from(empty, rows, cols, scale_size)
        return Activations(empty((rows, cols), torch.float32), quantised)

    def _launch(self, launcher: Callable[..., None], *args: object, **options: object) -> None:
        if self._calls_launchers:
            launcher(*args, **options)
