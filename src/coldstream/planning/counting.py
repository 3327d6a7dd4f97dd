"""Counts what models take of memory, by runs that read no weights.

So the counts are those of the runners that compute later. A GPU's runner is counted over tensors without
memory, which takes some tenths of a second for a large model.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coldstream.experts.prefetch import LAYERS_AHEAD, MAX_PREFETCHED, Prefetching
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cpu_ops import UnreadCpuOps
from coldstream.kernels.experts.shapes import MAX_SHARED_ROWS
from coldstream.kvcache.cache import CacheSize
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.cuda.capacity import mailbox_ranks
from coldstream.models.expert_stacks import disk_tier, placed_stacks
from coldstream.models.runner_capacity import RunnerCapacity
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.plan import FixedPart
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.unknowns import GpuShape, RamParts, RamShape, WorkspaceShape


def count_on_gpu(file: GGUFFile, spec: ModelSpec, sizes: ModelSizes, shape: GpuShape) -> FixedPart:
    """What a runner on a GPU takes beside experts.

    Reads the small tensors of the file. Raises as `CausalLM.load` and `MtpModel.load`.
    """
    # Imported here because its kernels need packages that a machine without a GPU may not have.
    from coldstream.models.cuda.limits import Limits
    from coldstream.models.cuda.memory_plan import count_memory

    capacity, draft = shape.capacity, shape.capacity.draft
    limits = Limits(
        capacity.cache_size,
        capacity.ctx_size,
        capacity.kv_type,
        has_mtp=draft.has_mtp,
        aux_layers=draft.aux_layers,
    )
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
    plan = count_memory(file, spec.with_window(shape.attention_window), limits, shape.chunk_size)
    return FixedPart(
        ctx_size=capacity.ctx_size,
        kv_type=capacity.kv_type,
        chunk_size=plan.chunk_size,
        weights=plan.weights - ring_bytes,
        caches=plan.caches,
        workspace=plan.workspace,
        drafter=draft.drafter_bytes,
        graphs=plan.graphs,
        reserve=plan.reserve,
        num_sequences=capacity.cache_size.num_states,
        num_tree_rows=capacity.cache_size.num_tree_rows,
    )


def count_in_ram(
    file: GGUFFile, spec: ModelSpec, shape: RamShape, cache_size: CacheSize | None = None
) -> RamParts:
    """What a runner on the CPU takes beside experts. Raises as `CpuRunner.count_memory`.

    cache_size: None for one that suits the memory.
    """

    def part(*, in_slots: bool) -> FixedPart:
        size = cache_size or CacheSize.shared(
            spec,
            shape.ctx_size,
            shape.kv_type,
            is_scarce=in_slots,
            num_tree_rows=shape.draft.num_tree_rows,
            num_contexts=shape.num_contexts,
        )
        capacity = RunnerCapacity(shape.ctx_size, shape.kv_type, size, shape.draft)
        tier = disk_tier(file, spec) if in_slots else None
        windowed = spec.with_window(shape.attention_window)
        fixed = CpuRunner.count_memory(file, windowed, shape.threads, shape.tier, capacity, tier)
        return replace(fixed, num_contexts=shape.num_contexts)

    return part(in_slots=False), part(in_slots=True) if spec.is_moe else None


def count_workspace(file: GGUFFile, spec: ModelSpec, shape: WorkspaceShape) -> int:
    """What the threads take to compute a layer's experts, counted without reading any."""
    ops = UnreadCpuOps(shape.threads)
    rows = shape.num_rows
    x = np.zeros((rows, spec.hidden_size), np.float32)
    ids = np.zeros((rows, mailbox_ranks(spec)), np.int32)

    def count(stacks: Sequence[TensorInfo]) -> int:
        first, *others, down = (ops.map_weight(file, info) for info in stacks)
        half = first.num_rows // 2
        gate, up = (first, *others) if others else (first.rows(0, half), first.rows(half, 2 * half))
        captured = ops.capture(rows, lambda: ops.routed_experts(x, ids, gate, up, down))
        return captured.graph.scratch_bytes

    # One layer of each kind.
    kinds = {tuple((info.quant_type, info.shape) for info in of): of for of in placed_stacks(file, spec)}
    return max(map(count, kinds.values()))
