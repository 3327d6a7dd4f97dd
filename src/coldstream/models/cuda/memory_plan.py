"""The memory of a model on one GPU, and the kernels of its steps, found before anything is copied.

A model is loaded and its forward pass runs over arrays without memory (`kernels/cuda/memory.py`). A layer's
launches follow from the types and shapes of its weights, never from their values. A model repeats a few
combinations of those, so that only the first layer of each kind is run.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np

from coldstream.errors import OutOfMemoryError, UnsupportedError
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.attention.cuda import HEAD_SIZES as ATTENTION_SIZES
from coldstream.kernels.attention.cuda import takes_heads_of
from coldstream.kernels.attention.workspace_sizes import PART_ROWS
from coldstream.kernels.cuda.array import RawArray, name_of
from coldstream.kernels.cuda.memory import MemoryPlan
from coldstream.kernels.cuda.program import CudaProgram, Noted, note_kernels
from coldstream.kernels.fused.cuda import PROGRAM as FUSED
from coldstream.kernels.gated_delta_net.arguments import HEAD_SIZES, TAPS
from coldstream.kernels.hyper_connections.cuda import MAX_STREAMS, MAX_WIDTH, SIZE_MULTIPLE
from coldstream.kernels.indexer.cuda import HEAD_SIZES as INDEXER_SIZES
from coldstream.kernels.indexer.cuda import takes_heads_of as takes_indexer_of
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.ngram.cuda import COLS_MULTIPLE, MOST_HEADS
from coldstream.kernels.ops import MAX_SHORT_CHAIN
from coldstream.kernels.router.cuda import EXPERTS_PER_LANE, MAX_CHOSEN, WARP_SIZE
from coldstream.kernels.sample.admit import PROGRAM as ADMISSION
from coldstream.kernels.sample.cuda import PROGRAM as SAMPLER
from coldstream.layers.moe import MoeWeights
from coldstream.models.cuda.capacity import GRAPH_BYTES, HEAD_ROWS, RESERVE_BYTES
from coldstream.models.cuda.inputs import MAX_DECODE_ROWS, StepShape
from coldstream.models.cuda.limits import MAX_GRAPH_ROWS, Limits, padded_rows
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.loader import Block
from coldstream.models.spec.model_spec import ModelSpec

GATES, UPS = ".ffn_gate_exps.weight", ".ffn_up_exps.weight"
MAX_EXPERTS = EXPERTS_PER_LANE[-1] * WARP_SIZE
ROWS_OF_GROUPS = (5, 17, 128)  # most rows of a step whose kernels are in a group


@dataclass(frozen=True)
class CudaMemoryPlan:
    """Bytes of a model on the device, and the tokens of a step of prefill."""

    weights: int
    caches: int
    workspace: int
    chunk_size: int
    experts: int = 0  # in slots; `weights` has those of whole layers
    tables: int = 0  # in page-locked RAM, and in no sum
    graphs: int = GRAPH_BYTES
    reserve: int = RESERVE_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.workspace + self.experts + self.graphs + self.reserve


Count = Callable[[GGUFFile, ModelSpec, Limits, int], CudaMemoryPlan]


def plan_memory(
    file: GGUFFile,
    spec: ModelSpec,
    limits: Limits,
    free_bytes: int,
    chunk_size: int,
    count: Count | None = None,
) -> CudaMemoryPlan:
    """The memory of the model with steps of up to `chunk_size` tokens.

    count: in place of `count_memory`. Raises OutOfMemoryError if it doesn't fit into `free_bytes`.
    """
    plan = (count or count_memory)(file, spec, limits, chunk_size)
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
    # A step that shares experts out may be longer than a text: it is recorded before there is one.
    shared = min(chunk_size, limits.shared_rows)
    for count in {padded_rows(min(most, MAX_GRAPH_ROWS)), min(most, shared), shared, chunk_size}:
        prompt = StepShape.prompt(count)
        # Far into a text attention takes more for a few hundred rows.
        for shape in {replace(prompt, has_trees=has_trees), replace(prompt, is_deep=count <= PART_ROWS)}:
            _step(loaded, limits, shape, num_wanted=min(count, HEAD_ROWS))
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
        tables=loaded.ops.table_bytes if limits.has_host_tables else 0,
    )


@dataclass(frozen=True)
class NeededKernels:
    """Kernels in the order of their need.

    If a first prompt is known, those of choosing its first token come first, and those of the next one.
    Those of the shortest steps at the begin of a text follow, then those of longer ones (ROWS_OF_GROUPS), and
    of everything else.
    """

    groups: tuple[Noted, ...]

    @property
    def all(self) -> Noted:
        return set().union(*self.groups)


def kernels_of(
    file: GGUFFile, spec: ModelSpec, limits: Limits, chunk_size: int, first_rows: int | None = None
) -> NeededKernels:
    """The kernels that steps of any size launch, and the kernels that choose tokens.

    first_rows: of the first prompt, or about so many; None: no prompt is known.
    """
    loaded = Loaded.into(MemoryPlan(), file, spec, limits, chunk_size, notes_kernels=True)
    distance = limits.prefetching.distance if limits.prefetching else 1
    mixers = loaded.with_layers(distinct_mixers(loaded.model.blocks))
    loaded = loaded.with_layers(distinct_layers(loaded.model.blocks, distance))
    deep: list[StepShape] = []
    choosing = _instances(SAMPLER, ADMISSION)
    known = [choosing] * len(ROWS_OF_GROUPS)  # up to each group's rows
    first: list[Noted] = []
    with note_kernels() as noted:
        for count in () if first_rows is None else (min(first_rows, chunk_size), 1):
            rows = limits.rows_of(count, chunk_size)
            _step(loaded, limits, StepShape.prompt(rows), num_wanted=1)
            first.append(choosing | noted)
        for count in row_counts(chunk_size):
            shape, *others = _shapes(count, limits.has_trees)
            _step(loaded, limits, shape, num_wanted=min(count, HEAD_ROWS))
            for shape in others:
                if not shape.is_deep:
                    mixers.mix(shape)  # nothing else asks which rows they are
            deep += [shape for shape in others if shape.is_deep]
            for group, most_rows in enumerate(ROWS_OF_GROUPS):
                if count <= most_rows:
                    known[group] = known[group] | noted
        for shape in deep:
            mixers.mix(shape)
        if limits.has_trees:
            loaded.commit()
        if loaded.mtp is not None:
            loaded.mtp.run_all()
    known = [*first, *known, noted | known[-1] | _instances(FUSED)]
    return NeededKernels((known[0], *(more - less for less, more in pairwise(known))))


def _step(loaded: Loaded, limits: Limits, shape: StepShape, *, num_wanted: int) -> None:
    """A step, and logits behind so many of its rows."""
    is_kept = limits.keeps_hidden(shape.num_rows)
    hidden = loaded.kept_step(shape) if is_kept else loaded.step(shape)
    loaded.model.logits(hidden.rows(0, num_wanted))


def _instances(*programs: CudaProgram) -> Noted:
    return {(program, instance) for program in programs for instance in program.instances}


def row_counts(most_rows: int) -> list[int]:
    """Rows of steps that launch every kernel which steps of up to `most_rows` launch, in order.

    A kernel is launched for one range of row counts.
    """
    return sorted({2**i for i in range(most_rows.bit_length())} | {2**i + 1 for i in range(6)})


def _shapes(count: int, has_trees: bool) -> Iterator[StepShape]:
    """Steps of `count` rows with all kernels. Long steps have no others than short ones."""
    if count > 2 * MAX_DECODE_ROWS:
        yield StepShape.prompt(count)
        return
    for trees, is_prompt, is_deep in product({False, has_trees}, (False, True), (False, True)):
        shape = StepShape(count, has_trees=trees, has_prompts=is_prompt, is_deep=is_deep)
        yield shape
        if trees:
            yield replace(shape, is_branching=True)


def check_supported(spec: ModelSpec) -> None:
    """UnsupportedError if the GPU has no kernels for a model of these dimensions."""
    has_delta_net = "delta_net" in spec.layer_kinds
    wanted = {
        **{
            f"attention heads of {size}: {ATTENTION_SIZES}": not takes_heads_of(size)
            for _, size in (*spec.kv_heads, *spec.nextn.kv_heads)
        },
        f"DeltaNet heads of {spec.ssm_state_size}: {HEAD_SIZES}": (
            has_delta_net and spec.ssm_state_size not in HEAD_SIZES
        ),
        f"{spec.conv_kernel} convolution taps: {TAPS.start} to {TAPS.stop - 1}": (
            has_delta_net and spec.conv_kernel not in TAPS
        ),
        f"{spec.num_experts_per_tok} experts a token: at most {MAX_CHOSEN}": (
            spec.num_experts_per_tok > MAX_CHOSEN
        ),
        f"{spec.num_experts} experts: at most {MAX_EXPERTS}": spec.num_experts > MAX_EXPERTS,
        **_missing_streams(spec),
        **_missing_ngrams(spec),
        **_missing_indexer(spec),
    }
    for what, is_missing in wanted.items():
        if is_missing:
            raise UnsupportedError(f"no GPU kernels for {what} are supported; use --device cpu")


def _missing_streams(spec: ModelSpec) -> dict[str, bool]:
    """Of `check_supported`, for residual streams, which a block keeps side by side in its shared memory."""
    if spec.hyper_connections is None:
        return {}
    count, size = spec.hyper_connections.num_streams, spec.hidden_size
    what = f"{count} residual streams of {size} values: up to {MAX_STREAMS}, {MAX_WIDTH} values together"
    return {what: size % SIZE_MULTIPLE != 0 or count > MAX_STREAMS or count * size > MAX_WIDTH}


def _missing_ngrams(spec: ModelSpec) -> dict[str, bool]:
    """Of `check_supported`, for the n-gram embedding of a layer."""
    if spec.ngram is None:
        return {}
    heads, width = len(spec.ngram.hashing.sizes), spec.ngram.width
    return {
        f"n-grams of {width} values together: multiples of {COLS_MULTIPLE}": width % COLS_MULTIPLE != 0,
        f"n-grams of {heads} heads: at most {MOST_HEADS}": heads > MOST_HEADS,
    }


def _missing_indexer(spec: ModelSpec) -> dict[str, bool]:
    """Of `check_supported`, for what chooses the positions that long texts attend to."""
    if spec.indexer is None or not spec.is_indexed:
        return {}
    size, layers = spec.indexer.head_dim, [each for each in spec.attentions if each.indexer is not None]
    return {
        f"an indexer's heads of {size}: {INDEXER_SIZES}": not takes_indexer_of(size),
        "an indexer beside a window": any(each.window is not None for each in layers),
    }


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


def distinct_layers(blocks: Sequence[Block], distance: int = 0) -> tuple[int, ...]:
    """The first layer of each kind, in order.

    distance: how many layers ahead missing experts are guessed; 0 if none are. A layer guesses nothing if
    there is no layer so far behind it.
    """
    first: dict[Hashable, int] = {}
    behind = 0  # layers behind this one that may miss an expert
    for layer in reversed(range(len(blocks))):
        block = blocks[layer]
        first[_kind(block), min(behind, distance)] = layer
        behind += isinstance(block.ffn, MoeWeights) and bool(block.ffn.experts.gate.is_partial)
    return tuple(sorted(first.values()))


def distinct_mixers(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The first layer with a mixer of each kind, in order."""
    first: dict[Hashable, int] = {}
    for layer, block in enumerate(blocks):
        first.setdefault(_kind(block.mixer), layer)
    return tuple(first.values())


def _kind(value: Any) -> Hashable:
    """Types and shapes of everything in `value`, without addresses and contents."""
    if isinstance(value, RawArray):
        return tuple(value.shape), name_of(value.dtype)
    if isinstance(value, np.ndarray):  # the host's copy of an array
        return value.shape, str(value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    kind: Any = type(value)
    if (names := _fields_of(kind)) is not None:
        return kind, tuple(_kind(getattr(value, name)) for name in names)
    plain: Hashable = value
    return plain


@cache
def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Names of the fields; None if it is no dataclass. Cached: to ask an enumeration takes long."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
