"""A model's GPU memory without its experts: the `FixedPart` of a placement.

It is counted by the dry run that also plans the GPU's memory. Without the packages for that, activations are
estimated from their widths, and the parts of attention from the context. On the CPU `CpuRunner.needs` counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from coldstream.experts.prefetching import LAYERS_AHEAD, MAX_PREFETCHED, Prefetching
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.attention.workspace_sizes import PART_ROWS, most_partial_bytes
from coldstream.kernels.cuda.device import missing_packages
from coldstream.kernels.experts.shapes import MAX_SHARED_ROWS
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.cache import CacheSize, kept_bytes
from coldstream.models.cuda.capacity import GRAPH_BYTES, RESERVE_BYTES
from coldstream.models.draft_room import DRAFT_VALUE_BYTES, NO_DRAFTS, DraftRoom
from coldstream.models.footprint import nextn_bytes
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.plan import FixedPart
from coldstream.placement.sizes import ModelSizes

# By tokens of a prefill step: the share that its activations may take of the memory left by weights and
# caches. Each step copies its missing experts over the bus once, so short steps cost more than a few slots.
_WORKSPACE_SHARES = {16384: 0.125, 8192: 0.25, 4096: 0.25, 2048: 0.5, 1024: 0.5, 512: 0.5, 256: 1.0}
CHUNK_SIZES = tuple(_WORKSPACE_SHARES)
_SHORT_CHUNK = 2048  # shorter ones don't fill a GPU
_FLOATS_BESIDE_EXPERTS = 16  # activations of a token in hidden states, plus one per expert

_Count = Callable[..., FixedPart]  # `_counted` or `_estimated`
_Parts = Callable[[int], FixedPart]  # by the tokens of a step


def fixed_parts_on_gpu(
    file: GGUFFile,
    spec: ModelSpec,
    sizes: ModelSizes,
    ctx_size: int,
    kv_type: str,
    budgets: Sequence[int],
    draft: DraftRoom = NO_DRAFTS,
    num_contexts: int = 1,
) -> list[FixedPart]:
    """The fixed part for each budget in bytes, with the largest prefill steps of modest activations.

    Steps are shorter, down to 2048 tokens, if all experts fit only then; and there are states for as many
    sequences as are useful in a step if those fit beside all experts.
    """
    count = _estimated if missing_packages() else _counted

    def made(count: _Count, chunk_size: int, is_scarce: bool = True) -> FixedPart:
        cache_size = CacheSize.shared(
            spec,
            ctx_size,
            kv_type,
            is_scarce=is_scarce,
            num_tree_rows=draft.num_tree_rows,
            num_contexts=num_contexts,
        )
        counted = count(file, spec, sizes, cache_size, ctx_size, kv_type, chunk_size, draft)
        return replace(counted, num_contexts=num_contexts)

    part = cache(partial(made, count))
    estimate = cache(partial(made, _estimated))

    def choose(budget: int) -> FixedPart:
        chosen = choose_chunk(budget)
        if chosen.total + sizes.all_expert_bytes > budget:
            return chosen  # not counted with more states, which take no less
        generous = part(chosen.chunk_size, is_scarce=False)
        return generous if generous.total + sizes.all_expert_bytes <= budget else chosen

    def choose_chunk(budget: int) -> FixedPart:
        modest = _largest_modest(part, estimate, budget)
        left = budget - sizes.all_expert_bytes
        if _without_workspace(part(modest)) < left < part(modest).total:
            shorter = [size for size in CHUNK_SIZES if _SHORT_CHUNK <= size < modest]
            return next((part(size) for size in shorter if part(size).total <= left), part(modest))
        return part(modest)

    return [choose(budget) for budget in budgets]


def _largest_modest(part: _Parts, estimate: _Parts, budget: int) -> int:
    """The longest step of modest activations, or the shortest one if none is.

    A longer step takes more workspace, and no larger a share of the rest is granted to it, so that all steps
    that are shorter than a modest one are modest too. Few parts are counted: those about the estimated size.
    """
    at = next((i for i, size in enumerate(CHUNK_SIZES) if _is_modest(estimate(size), budget)), -1)
    at %= len(CHUNK_SIZES)
    while at > 0 and _is_modest(part(CHUNK_SIZES[at - 1]), budget):
        at -= 1
    return next((size for size in CHUNK_SIZES[at:] if _is_modest(part(size), budget)), CHUNK_SIZES[-1])


def _is_modest(part: FixedPart, budget: int) -> bool:
    left = budget - _without_workspace(part)
    return part.workspace <= max(0, left) * _WORKSPACE_SHARES[part.chunk_size]


def _without_workspace(part: FixedPart) -> int:
    return part.total - part.workspace


def least_bytes(spec: ModelSpec, sizes: ModelSizes) -> int:
    """About the smallest fixed part without caches, which a default context must leave free."""
    reserved = GRAPH_BYTES + RESERVE_BYTES
    return sizes.dense_bytes + sizes.state_bytes + reserved + _activation_bytes(spec, CHUNK_SIZES[-1])


def _counted(
    file: GGUFFile,
    spec: ModelSpec,
    sizes: ModelSizes,
    cache_size: CacheSize,
    ctx_size: int,
    kv_type: str,
    chunk_size: int,
    draft: DraftRoom,
) -> FixedPart:
    # Imported here because its kernels need packages that a machine without a GPU may not have.
    from coldstream.models.cuda.limits import Limits
    from coldstream.models.cuda.memory_plan import count_memory

    limits = Limits(cache_size, ctx_size, kv_type, has_mtp=draft.has_mtp, taps=draft.taps)
    ring_bytes = 0
    if spec.is_moe:
        # With the memory of prefetching other than places; the placement itself counts experts and the ring.
        most = Prefetching(LAYERS_AHEAD, MAX_PREFETCHED)
        ring_bytes = most.num_layers * most.experts * max(sizes.expert_bytes)
        limits = replace(
            limits, expert_bytes=0, ring_bytes=ring_bytes, prefetching=most, shared_rows=MAX_SHARED_ROWS
        )
    elif sizes.is_dense:
        ring_bytes = max(sizes.expert_bytes)
        limits = replace(limits, expert_bytes=0, ring_bytes=ring_bytes, is_dense=True)
    plan = count_memory(file, spec, limits, chunk_size)
    return FixedPart(
        ctx_size=ctx_size,
        kv_type=kv_type,
        chunk_size=plan.chunk_size,
        weights=plan.weights - ring_bytes,
        caches=plan.caches,
        workspace=plan.workspace,
        drafter=draft.drafter_bytes,
        graphs=plan.graphs,
        reserve=plan.reserve,
        num_sequences=cache_size.num_states,
        num_tree_rows=cache_size.num_tree_rows,
    )


def _estimated(
    file: GGUFFile,
    spec: ModelSpec,
    sizes: ModelSizes,
    cache_size: CacheSize,
    ctx_size: int,
    kv_type: str,
    chunk_size: int,
    draft: DraftRoom,
) -> FixedPart:
    has_mtp = draft.has_mtp
    mtp_bytes = nextn_bytes(spec, file.tensors) if has_mtp else 0
    num_layers = spec.layer_kinds.count("attention")
    kv_token_bytes = sizes.kv_token_bytes // num_layers if num_layers else 0
    return FixedPart(
        ctx_size=ctx_size,
        kv_type=kv_type,
        chunk_size=chunk_size,
        weights=sizes.dense_bytes + mtp_bytes,
        caches=cache_size.num_blocks
        * BLOCK_POSITIONS
        * (sizes.kv_token_bytes + (kv_token_bytes if has_mtp else 0))
        + cache_size.num_states * sizes.state_bytes
        + cache_size.num_tree_rows * kept_bytes(spec)
        + DRAFT_VALUE_BYTES["cuda"] * len(draft.taps) * chunk_size * spec.hidden_size,
        workspace=_workspace_bytes(spec, ctx_size, chunk_size),
        drafter=draft.drafter_bytes,
        graphs=GRAPH_BYTES,
        reserve=RESERVE_BYTES,
        num_sequences=cache_size.num_states,
        num_tree_rows=cache_size.num_tree_rows,
    )


def _workspace_bytes(spec: ModelSpec, ctx_size: int, chunk_size: int) -> int:
    """Of a prefill step or, if that takes more, of one whose attention merges chunks of positions."""
    partial_bytes = most_partial_bytes(spec.attention.num_heads, spec.head_dim, ctx_size)
    # About half of the activations are there beside these chunks; the others are experts'.
    beside = _activation_bytes(spec, min(chunk_size, PART_ROWS)) // 2
    return max(_activation_bytes(spec, chunk_size), partial_bytes + beside)


def _activation_bytes(spec: ModelSpec, chunk_size: int) -> int:
    return 4 * chunk_size * spec.hidden_size * (_FLOATS_BESIDE_EXPERTS + spec.num_experts_per_tok)
