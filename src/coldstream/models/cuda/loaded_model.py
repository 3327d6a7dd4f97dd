"""A model on one GPU: its memory plan, and its forward pass over that memory.

All device memory is counted before anything is copied, by loading the model and running its forward pass over
tensors without memory (`kernels/cuda/memory.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Self

import torch

from coldstream.errors import OutOfMemoryError, UnsupportedError
from coldstream.experts.executor import PartialExecutor
from coldstream.experts.host import HostExperts
from coldstream.experts.layer_executor import LayerExecutor
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.attention.cuda import HEAD_MULTIPLE, LARGEST_HEAD
from coldstream.kernels.attention.workspace_sizes import PART_ROWS
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.memory import Memory, MemoryPlan
from coldstream.kernels.cuda.program import Noted, note_kernels
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.executor import ExecutorFactory, ModelExecutor, ResidentExecutor
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.gated_delta_net.arguments import HEAD_SIZES, TAPS
from coldstream.kernels.linear.reference import INTEGER_TYPES
from coldstream.kernels.ops import MAX_SHORT_CHAIN, FfnWeights, Rows
from coldstream.kernels.rounds.cuda import PROGRAM as ROUNDS
from coldstream.kernels.router.cuda import EXPERTS_PER_LANE, MAX_CHOSEN, WARP_SIZE
from coldstream.kernels.sample.admit import PROGRAM as ADMISSION
from coldstream.kernels.sample.cuda import PROGRAM as SAMPLER
from coldstream.kvcache.cache import ModelCache
from coldstream.kvcache.sequence_cache import SequenceCache
from coldstream.layers.moe import MoeWeights
from coldstream.models.causal_lm import CausalLM, ignore_layer
from coldstream.models.cuda.capacity import GRAPH_BYTES, HEAD_ROWS, RESERVE_BYTES, mailbox_ranks
from coldstream.models.cuda.distinct_layers import distinct_layers, distinct_mixers
from coldstream.models.cuda.features import Features
from coldstream.models.cuda.fused_draft import RoundMemory
from coldstream.models.cuda.inputs import MAX_DECODE_ROWS, Commits, Inputs, StepShape
from coldstream.models.cuda.limits import MAX_GRAPH_ROWS, Limits, padded_rows
from coldstream.models.cuda.logits import Sampler
from coldstream.models.cuda.mtp import LoadedMtp
from coldstream.models.mtp.model import MtpModel
from coldstream.models.spec.model_spec import ModelSpec

GATES, UPS = ".ffn_gate_exps.", ".ffn_up_exps."
MAX_EXPERTS = EXPERTS_PER_LANE[-1] * WARP_SIZE


@dataclass(frozen=True)
class CudaMemoryPlan:
    """Bytes of a model on the device, and the tokens of a step of prefill."""

    weights: int
    caches: int
    workspace: int
    chunk_size: int
    experts: int = 0  # in slots; `weights` has those of whole layers
    graphs: int = GRAPH_BYTES
    reserve: int = RESERVE_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.workspace + self.experts + self.graphs + self.reserve


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
    rounds: RoundMemory | None  # of drafts by what reads states or features, if all experts are on the device

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
        """Loads into `memory`; over a `MemoryPlan` only small tensors are read, and `host` is None.

        own: as `CudaOps` takes it.
        """
        rows = max(chunk_size, MAX_DECODE_ROWS)
        make_executor = _model_executor_factory(spec, limits, host)
        ops = CudaOps(
            memory, limits.context_length, rows, make_executor, own=own, notes_kernels=notes_kernels
        )
        model = CausalLM.load(file, spec, ops)
        if isinstance(ops.model_executor, PartialExecutor):
            mixtures = (block.ffn for block in model.blocks if isinstance(block.ffn, MoeWeights))
            ops.model_executor.number_layers((moe.ffn_gate_inp, moe.experts) for moe in mixtures)
        if isinstance(ops.model_executor, LayerExecutor):
            dense = (block.ffn for block in model.blocks if isinstance(block.ffn, FfnWeights))
            ops.model_executor.number_layers(dense)
        mtp_weights = MtpModel.load(file, model, ops) if limits.has_mtp else None
        weight_bytes = memory.persistent_bytes
        sequences = SequenceCache(spec, ops, limits.cache_size, limits.kv_type)
        inputs = Inputs.into(ops, rows, limits.context_length)
        commits = Commits.into(ops, limits.context_length)
        hidden = ops.activations(min(rows, MAX_GRAPH_ROWS), spec.hidden_size, persistent=True)
        features = Features.into(memory, limits.taps, rows, spec.hidden_size) if limits.taps else None
        sampler = Sampler(ops.zeros, limits.most_chosen, limits.context_length)
        mtp = rounds = None
        if mtp_weights is not None:
            sizes = (limits.cache_size, limits.context_length, limits.kv_type)
            mtp = LoadedMtp.into(memory, ops, mtp_weights, *sizes)
        if (mtp or features) and limits.has_trees and limits.expert_bytes is None:
            rounds = RoundMemory.into(ops, limits.context_length)
        states = sequences.tensors
        parts = (
            memory,
            ops,
            model,
            sequences,
            states,
            inputs,
            commits,
            hidden,
            features,
            sampler,
            weight_bytes,
        )
        return cls(*parts, mtp, rounds)

    def with_layers(self, layers: Sequence[int]) -> Self:
        """The same with some of the layers only, for finding out what they launch."""
        blocks = tuple(self.model.blocks[layer] for layer in layers)
        return replace(self, model=replace(self.model, blocks=blocks), states=self.states.with_layers(layers))

    def logits(self, shape: StepShape) -> torch.Tensor:
        """The logits [rows, vocab] after each row of the inputs."""
        return self.logits_after(*self.inputs.take(shape))

    def logits_after(self, token_ids: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The logits [rows, vocab] after rows, valid until the next step."""
        hidden = self._forward(token_ids, rows)
        if self.mtp is not None:
            self.mtp.trunk_states[: len(token_ids)].copy_(hidden.values)
        logits: torch.Tensor = self.model.logits(hidden)
        return logits

    def kept_step(self, shape: StepShape) -> Activations:
        """`step`, with the result in `hidden`."""
        kept = self.hidden.rows(0, shape.num_rows)
        kept.copy_(self.step(shape))
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
            self.model.mix(block, x, angles, state, rows)

    def _forward(self, token_ids: torch.Tensor, rows: Rows) -> Activations:
        self.ops.start_step(rows)
        try:
            keep = ignore_layer if self.features is None else self.features.keep
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
        num_layers=spec.num_layers,
        mailbox=mailbox,
        host=host,
        whole_layers=whole_layers,
        ring_bytes=limits.ring_bytes,
        prefetching=limits.prefetching,
    )


def plan_memory(
    file: GGUFFile, spec: ModelSpec, limits: Limits, free_bytes: int, chunk_size: int
) -> CudaMemoryPlan:
    """The memory of the model with steps of up to `chunk_size` tokens.

    Raises OutOfMemoryError if it doesn't fit into `free_bytes`.
    """
    plan = count_memory(file, spec, limits, chunk_size)
    if plan.total <= free_bytes:
        return plan
    gib = 2**30
    raise OutOfMemoryError(
        f"the GPU needs {plan.total / gib:.2f} GiB, {free_bytes / gib:.2f} GiB are free: weights "
        f"{plan.weights / gib:.2f}, caches of {limits.context_length} tokens {plan.caches / gib:.2f}, "
        f"experts {plan.experts / gib:.2f}, "
        f"workspace {(plan.total - plan.weights - plan.caches - plan.experts) / gib:.2f}. Choose a smaller "
        "--vram, a smaller --ctx-size, or --device cpu"
    )


def count_memory(file: GGUFFile, spec: ModelSpec, limits: Limits, chunk_size: int) -> CudaMemoryPlan:
    """The memory of the model with steps of up to `chunk_size` tokens, counted by a run without memory."""
    memory = MemoryPlan()
    loaded = Loaded.into(memory, file, spec, limits, chunk_size)
    has_trees = limits.has_trees
    for count in (1, MAX_SHORT_CHAIN, MAX_DECODE_ROWS):
        loaded.logits(StepShape(count, has_trees))
    most = min(chunk_size, limits.context_length)
    for count in {padded_rows(min(most, MAX_GRAPH_ROWS)), min(most, limits.shared_rows), chunk_size}:
        prompt = StepShape.prompt(count)
        # Far into a text attention takes more for a few hundred rows.
        for shape in {replace(prompt, has_trees=has_trees), replace(prompt, is_deep=count <= PART_ROWS)}:
            hidden = loaded.kept_step(shape) if limits.is_captured(count) else loaded.step(shape)
            loaded.model.logits(hidden.rows(0, min(count, HEAD_ROWS)))
    if has_trees:
        loaded.commit()
    if loaded.mtp is not None:
        loaded.mtp.run_all()
    return CudaMemoryPlan(
        weights=loaded.weight_bytes,
        caches=memory.persistent_bytes - loaded.weight_bytes,
        workspace=memory.workspace_bytes,
        chunk_size=chunk_size,
        experts=limits.expert_bytes or 0,
    )


def kernels_of(file: GGUFFile, spec: ModelSpec, limits: Limits, chunk_size: int) -> Noted:
    """The kernels that steps of any size launch, and those of choosing tokens."""
    loaded = Loaded.into(MemoryPlan(), file, spec, limits, chunk_size, notes_kernels=True)
    distance = limits.prefetching.distance if limits.prefetching else 0
    mixers = loaded.with_layers(distinct_mixers(loaded.model.blocks))
    loaded = loaded.with_layers(distinct_layers(loaded.model.blocks, distance))
    # A kernel is launched for one range of row counts, so that these counts meet all of them.
    sizes = {2**i for i in range(chunk_size.bit_length())} | {2**i + 1 for i in range(6)}
    with note_kernels() as noted:
        for count in sorted(sizes):
            shape, *others = _shapes(count, limits.has_trees)
            hidden = loaded.step(shape)
            loaded.model.logits(hidden.rows(0, min(count, HEAD_ROWS)))
            for shape in others:
                mixers.mix(shape)  # nothing else asks which rows they are
        if limits.has_trees:
            loaded.commit()
        if loaded.mtp is not None:
            loaded.mtp.run_all()
    chosen = {
        (program, instance) for program in (SAMPLER, ADMISSION, ROUNDS) for instance in program.instances
    }
    return noted | chosen


def _shapes(count: int, has_trees: bool) -> Iterator[StepShape]:
    """Steps of `count` rows with all kernels. Those of many rows have no others than those of fewer."""
    if count > 2 * MAX_DECODE_ROWS:
        yield StepShape.prompt(count)
        return
    for trees, is_prompt, is_deep in product({False, has_trees}, (False, True), (False, True)):
        shape = StepShape(count, has_trees=trees, has_prompts=is_prompt, is_deep=is_deep)
        yield shape
        if trees:
            yield replace(shape, has_branches=True)


def check_supported(spec: ModelSpec) -> None:
    """UnsupportedError if the GPU has no kernels for a model of these dimensions."""
    has_delta_net = "delta_net" in spec.layer_kinds
    wanted = {
        f"attention heads of {spec.head_dim}: multiples of {HEAD_MULTIPLE} up to {LARGEST_HEAD}": (
            spec.head_dim % HEAD_MULTIPLE or spec.head_dim > LARGEST_HEAD
        ),
        f"DeltaNet heads of {spec.ssm_state_size}: {HEAD_SIZES}": (
            has_delta_net and spec.ssm_state_size not in HEAD_SIZES
        ),
        f"a convolution of {spec.conv_kernel} taps: {TAPS.start} to {TAPS.stop - 1}": (
            has_delta_net and spec.conv_kernel not in TAPS
        ),
        f"{spec.num_experts_per_tok} experts a token: at most {MAX_CHOSEN}": (
            spec.num_experts_per_tok > MAX_CHOSEN
        ),
        f"{spec.num_experts} experts: at most {MAX_EXPERTS}": spec.num_experts > MAX_EXPERTS,
    }
    for what, is_missing in wanted.items():
        if is_missing:
            raise UnsupportedError(f"no GPU kernels for {what} are supported; use --device cpu")


def check_types(tensors: Mapping[str, TensorInfo]) -> None:
    """UnsupportedError if the GPU has no kernels for tensors of these types together."""
    for name, gate in tensors.items():
        up = tensors.get(name.replace(GATES, UPS))
        if GATES not in name or up is None:
            continue
        if (gate.quant_type in INTEGER_TYPES) != (up.quant_type in INTEGER_TYPES):
            raise UnsupportedError(
                f"{name} is {gate.quant_type.name} and {up.name} {up.quant_type.name}: no GPU kernels "
                "multiply by integers and by floats together; use --device cpu"
            )
