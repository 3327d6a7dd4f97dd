"""A model in the memory of one GPU, and its forward pass over that memory.

Loading into a plan of memory (`kernels/cuda/memory.py`) copies nothing: `memory_plan.py` counts that way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from coldstream.experts.dense_layers import LayerExecutor
from coldstream.experts.executor import PartialExecutor
from coldstream.experts.host import HostExperts
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.copy_rows import copy_rows_cuda
from coldstream.kernels.cuda.copy_values import copy_values_cuda
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.executor import ExecutorFactory, ModelExecutor, ResidentExecutor
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.ops import FfnWeights, Rows
from coldstream.kvcache.batch import rows_in_windows
from coldstream.kvcache.cache import ModelCache, is_windowed
from coldstream.kvcache.sequence_cache import SequenceCache
from coldstream.layers.moe import MoeWeights
from coldstream.models.causal_lm import CausalLM, ignore_layer
from coldstream.models.cuda.capacity import mailbox_ranks
from coldstream.models.cuda.features import Features
from coldstream.models.cuda.inputs import MAX_DECODE_ROWS, Commits, FusedMemory, Inputs, StepShape
from coldstream.models.cuda.limits import MAX_GRAPH_ROWS, Limits
from coldstream.models.cuda.logits import Sampler
from coldstream.models.cuda.mtp_block import LoadedMtp
from coldstream.models.mtp.model import MtpModel
from coldstream.models.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class Loaded:
    """A model, its caches and its inputs in some memory."""

    memory: Memory
    ops: CudaOps
    model: CausalLM
    sequences: SequenceCache
    states: ModelCache  # of the model's layers
    inputs: Inputs
    commits: Commits
    hidden: Activations  # [most rows of a graph, E], hidden states of captured steps
    features: Features | None  # of the last step, for a drafter that reads them
    sampler: Sampler
    weight_bytes: int
    mtp: LoadedMtp | None
    fused: FusedMemory | None  # with what reads states or features, if all experts are on the device

    @classmethod
    def into(
        cls,
        memory: Memory,
        file: GGUFFile,
        spec: ModelSpec,
        limits: Limits,
        chunk_size: int,
        *,
        host: HostExperts | None = None,
        own: ExecutorFactory | None = None,
        notes_kernels: bool = False,
    ) -> Self:
        """Loads into `memory`. Over a `MemoryPlan` only small tensors are read, and `host` is None.

        own: as `CudaOps` takes it.
        """
        rows = max(chunk_size, MAX_DECODE_ROWS)
        make_executor = _model_executor_factory(spec, limits, host)
        sizes, tables = (limits.context_length, rows), limits.has_host_tables
        ops = CudaOps(
            memory, *sizes, make_executor, own=own, notes_kernels=notes_kernels, has_host_tables=tables
        )
        spec = (model := CausalLM.load(file, spec.for_context(limits.context_length), ops)).spec
        if isinstance(ops.model_executor, PartialExecutor):
            mixtures = (block.ffn for block in model.blocks if isinstance(block.ffn, MoeWeights))
            ops.model_executor.number_layers((moe.router, moe.experts) for moe in mixtures)
        if isinstance(ops.model_executor, LayerExecutor):
            dense = (block.ffn for block in model.blocks if isinstance(block.ffn, FfnWeights))
            ops.model_executor.number_layers(dense)
        mtp_weights = MtpModel.load(file, model, ops) if limits.has_mtp else None
        weight_bytes = memory.persistent_bytes
        sequences = SequenceCache(spec, ops, limits.cache_size, limits.kv_type, chunk_size)
        has_windows = sequences.tensors.has_windows
        inputs = Inputs.into(ops, rows, limits.context_length, has_windows=has_windows)
        commits = Commits.into(ops, limits.context_length, has_windows=has_windows)
        hidden = ops.activations(min(rows, MAX_GRAPH_ROWS), spec.hidden_size, persistent=True)
        features = (
            Features.into(memory, limits.aux_layers, rows, spec.hidden_size) if limits.aux_layers else None
        )
        sampler = Sampler(ops.zeros, limits.most_chosen, limits.context_length, spec.vocab_size)
        mtp = fused = None
        if mtp_weights is not None:
            mtp = LoadedMtp.into(ops, mtp_weights, limits.cache_size, sizes[0], limits.kv_type, rows)
        if (mtp or features) and limits.has_trees and limits.expert_bytes is None:
            fused = FusedMemory.into(ops, limits.context_length, has_windows=has_windows)
        return cls(
            memory=memory,
            ops=ops,
            model=model,
            sequences=sequences,
            states=sequences.tensors,
            inputs=inputs,
            commits=commits,
            hidden=hidden,
            features=features,
            sampler=sampler,
            weight_bytes=weight_bytes,
            mtp=mtp,
            fused=fused,
        )

    def with_layers(self, layers: Sequence[int]) -> Self:
        """The same with some of the layers only, for finding out what they launch."""
        blocks = tuple(self.model.blocks[layer] for layer in layers)
        return replace(self, model=replace(self.model, blocks=blocks), states=self.states.with_layers(layers))

    def logits(self, shape: StepShape) -> DeviceArray:
        """The logits [rows, vocab] after each row of the inputs."""
        return self.logits_after(*self.inputs.take(shape))

    def logits_after(self, token_ids: DeviceArray, rows: Rows) -> DeviceArray:
        """The logits [rows, vocab] after rows, valid until the next step."""
        hidden = self._forward(token_ids, rows)
        if self.mtp is not None and not self.mtp.has_streams:
            self.ops.launch(copy_values_cuda, hidden.values, self.mtp.trunk_states[: len(token_ids)])
        logits: DeviceArray = self.model.logits(hidden)
        return logits

    def kept_step(self, shape: StepShape) -> Activations:
        """`step`, with the result in `hidden`."""
        kept = self.hidden.rows(0, shape.num_rows)
        self.ops.launch(copy_rows_cuda, self.step(shape), kept)
        return kept

    def step(self, shape: StepShape) -> Activations:
        """The hidden states of the inputs, valid until the next step."""
        return self._forward(*self.inputs.take(shape))

    def mix(self, shape: StepShape) -> None:
        """Launches what the mixers of a step do, for finding out what that is."""
        rows = self.inputs.take(shape)[1]
        x = self.ops.activations(shape.num_rows, self.model.spec.hidden_size)
        angles = self.model.angles(rows)
        for block, state in zip(self.model.blocks, self.states.layers, strict=True):
            inputs = self.model.project(block, x, angles, state, rows)
            self.model.mix(block, inputs, state, rows_in_windows(rows) if is_windowed(state) else rows)

    def _forward(self, token_ids: DeviceArray, rows: Rows) -> Activations:
        self.ops.start_step(rows)
        try:
            keep = ignore_layer if self.features is None else partial(self.features.keep, self.ops.launch)
            if self.mtp is not None and self.mtp.has_streams:
                keep = partial(self.mtp.keep_streams, len(self.model.blocks) - 1)  # no features beside
            hidden: Activations = self.model.forward(token_ids, rows, self.states, keep)
            return hidden
        finally:
            self.ops.finish_step()  # joins other streams, also before a capture is abandoned

    def commit(self) -> None:
        """Advances the caches of a sequence by the rows in `commits`."""
        self.model.commit(self.commits.take(), self.states)


def _model_executor_factory(
    spec: ModelSpec, limits: Limits, host: HostExperts | None
) -> Callable[[MoeKernels], ModelExecutor]:
    """The factory of the executor that computes a model's experts within its limits."""
    if limits.expert_bytes is None:
        return ResidentExecutor
    sizes = mailbox_ranks(spec), spec.hidden_size, limits.shared_rows
    mailbox = host.mailbox if host else Mailbox.planned(*sizes)
    whole_layers = limits.whole_layers | ({spec.num_layers} if limits.has_mtp else set())
    if limits.is_dense:
        return partial(
            LayerExecutor,
            mailbox=mailbox,
            host=host,
            whole_layers=whole_layers,
            ring_bytes=limits.ring_bytes,
        )
    return partial(
        PartialExecutor,
        num_layers=len(spec.placed_layers),
        mailbox=mailbox,
        host=host,
        whole_layers=whole_layers,
        ring_bytes=limits.ring_bytes,
        prefetching=limits.prefetching,
        is_served_by_card=limits.is_served_by_card,
    )
