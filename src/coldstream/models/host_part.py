"""RAM of a model on a GPU: what it takes beside experts, and whether the file finds room there as a whole.

Where the GPU lacks experts, either the whole file is mapped and locked in RAM, or there is a pool. This
module counts what the runner allocates besides, in `experts/host.py`, `experts/copies.py` and its own file.
"""

from collections.abc import Sequence

import numpy as np

from coldstream.experts.landing import STAGING_BUFFERS, RingShape
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cpu_ops import UnreadCpuOps
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.models.cuda.capacity import HEAD_ROWS, mailbox_ranks
from coldstream.models.expert_stacks import placed_stacks
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.plan import PlacementPlan
from coldstream.placement.pool_plan import HostPart

# Of PyTorch, the driver and the program, and the buffers through which weights go to the GPU at first.
HOST_RESERVE_BYTES = 1152 * 2**20
_FLOAT, _ID = 4, 4
_LINES = 2 * 64  # of a mailbox's words


def mapped_bytes(file: GGUFFile, spec: ModelSpec, placement: PlacementPlan) -> int:
    """Bytes of the parts of the file that are locked in RAM if experts are mapped."""
    stacks = placed_stacks(file, spec)
    partial = [of for layer, of in enumerate(stacks) if layer not in placement.pinned_layers]
    return sum(file.shard_bytes[shard] for shard in {info.shard for of in partial for info in of})


def host_part(
    file: GGUFFile,
    spec: ModelSpec,
    placement: PlacementPlan,
    threads: int,
    max_cpu_rows: int,
    prompt_cache: int = 0,
) -> HostPart:
    """What RAM holds beside experts, by the sizes of what the runner allocates.

    prompt_cache: bytes of kept prefixes. Where the GPU holds all experts, the CPU is asked for none.
    """
    if placement.is_all_resident:
        return HostPart(0, 0, HOST_RESERVE_BYTES, prompt_cache)
    return HostPart(
        buffers=_buffer_bytes(spec, placement, max_cpu_rows),
        workspace=_workspace_bytes(file, spec, threads, max(max_cpu_rows, MAX_MAILBOX_ROWS)),
        reserve=HOST_RESERVE_BYTES,
        prompt_cache=prompt_cache,
    )


def _buffer_bytes(spec: ModelSpec, placement: PlacementPlan, max_cpu_rows: int) -> int:
    ranks, size = mailbox_ranks(spec), spec.hidden_size
    sizes = [placement.fixed.chunk_size * ranks * _ID, HEAD_ROWS * spec.vocab_size * _FLOAT]
    for rows in (MAX_MAILBOX_ROWS, max(1, max_cpu_rows)):
        sizes += [_LINES, rows * size * _FLOAT, rows * ranks * _ID, rows * ranks * size * _FLOAT]
    if spec.is_moe:
        sizes += [RingShape.of(placement.ring_bytes).landing_bytes] * STAGING_BUFFERS
    # PyTorch rounds page-locked memory up to powers of two.
    return sum(1 << (num_bytes - 1).bit_length() for num_bytes in sizes if num_bytes)


def _workspace_bytes(file: GGUFFile, spec: ModelSpec, threads: int, rows: int) -> int:
    """Of the threads that compute up to `rows` rows of a layer's experts, counted without reading any."""
    ops = UnreadCpuOps(threads)
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
