"""Attention in Triton: the bits of `cuda.py`, on whatever Triton runs on.

Every sum of the definition is one chain, so there is no matrix product in here: scores grow by one dimension
of the heads at a time, numerators by one position.
"""

import torch
import triton
import triton.language as tl

from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.attention import triton_turned
from coldstream.kernels.attention.cuda import AttentionInputs, AttentionShape, Caches, DecodeWorkspace
from coldstream.kernels.attention.triton_blocks import (
    CHUNK,
    NEGATIVE_INFINITY,
    SCALE_VALUES,
    attend_chunk,
    norm_and_rotate,
    store_values,
)
from coldstream.kernels.ops import Rows

DECODE_SPLITS = 64  # programs that share the chunks of a row and a key/value head
PREFILL_ROWS = 16  # pairs of a token and a query head
NUM_WARPS = 4


@triton.jit
def prepare_kernel(
    query_gate,
    key,
    value,
    q_norm,
    k_norm,
    angles,
    positions,
    slots,
    query,
    k_cache,
    v_cache,
    slot_stride,
    position_stride,
    head_stride,
    query_gate_stride,
    key_stride,
    value_stride,
    num_heads,
    num_kv_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_HALF: tl.constexpr,
    TYPE: tl.constexpr,
):
    """One program: head program_id(1) (queries, then keys, then values) of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    i = tl.arange(0, WIDTH)
    angles += row * ROPE_HALF * 2
    place = tl.load(slots + row).to(tl.int64) * slot_stride + tl.load(positions + row) * position_stride
    if unit < num_heads:
        x = query_gate + row * query_gate_stride + unit * 2 * HEAD_DIM
        ready = norm_and_rotate(x, q_norm, eps, angles, HEAD_DIM, WIDTH, ROPE_HALF)
        ready = ready * tl.div_rn(1.0, tl.sqrt_rn(tl.full((1,), HEAD_DIM, tl.float32)))
        if TYPE == "tq3_0":
            ready = triton_turned.turn(ready) * (1 / SCALE_VALUES)
        tl.store(query + (row * num_heads + unit) * HEAD_DIM + i, ready, mask=i < HEAD_DIM)
    elif unit < num_heads + num_kv_heads:
        head = unit - num_heads
        x = key + row * key_stride + head * HEAD_DIM
        ready = norm_and_rotate(x, k_norm, eps, angles, HEAD_DIM, WIDTH, ROPE_HALF)
        store_values(k_cache, place + head * head_stride, ready, HEAD_DIM, WIDTH, TYPE)
    else:
        head = unit - num_heads - num_kv_heads
        values = tl.load(value + row * value_stride + head * HEAD_DIM + i, mask=i < HEAD_DIM, other=0.0)
        store_values(v_cache, place + head * head_stride, values, HEAD_DIM, WIDTH, TYPE)


@triton.jit
def first_position(position, window):
    return tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)


@triton.jit
def decode_kernel(
    query,
    k_cache,
    v_cache,
    positions,
    slots,
    values,
    stats,
    slot_stride,
    position_stride,
    head_stride,
    num_heads,
    num_kv_heads,
    max_chunks,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    """One program: every SPLITS-th chunk of row program_id(0) and key/value head program_id(1)."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    i = tl.arange(0, WIDTH)
    member = tl.arange(0, ROWS)
    head = token * num_heads + kv_head * GROUP + tl.minimum(member, GROUP - 1)
    last = tl.load(positions + token)
    first = first_position(last, window)
    base = tl.load(slots + token).to(tl.int64) * slot_stride + kv_head * head_stride
    start = first // CHUNK
    none = tl.zeros((ROWS,), tl.int32)
    for chunk in range(start + tl.program_id(2), last // CHUNK + 1, SPLITS):
        maxima, denominators, numerators = attend_chunk(
            query, head * HEAD_DIM, none + first, none + last, k_cache, v_cache, base, position_stride,
            chunk * CHUNK, first, last, ROWS, HEAD_DIM, WIDTH, TYPE,
        )  # fmt: skip
        at = head * max_chunks + chunk - start
        tl.store(stats + at * 2, maxima, mask=member < GROUP)
        tl.store(stats + at * 2 + 1, denominators, mask=member < GROUP)
        mask = (member < GROUP)[:, None] & (i < HEAD_DIM)[None, :]
        tl.store(values + at[:, None] * HEAD_DIM + i[None, :], numerators, mask=mask)


@triton.jit
def merge_kernel(
    query_gate,
    positions,
    values,
    stats,
    out,
    query_gate_stride,
    num_heads,
    max_chunks,
    window,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    """One program: the chunks of row program_id(0) and query head program_id(1), in ascending order."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, WIDTH)
    at = (token * num_heads + head) * max_chunks
    last = tl.load(positions + token)
    count = last // CHUNK - first_position(last, window) // CHUNK + 1
    one = tl.arange(0, 1)
    maximum, denominator = tl.load(stats + at * 2 + one), tl.load(stats + at * 2 + 1 + one)
    numerators = tl.load(values + at * HEAD_DIM + i, mask=i < HEAD_DIM, other=0.0)
    for chunk in range(1, count):
        other = tl.load(stats + (at + chunk) * 2 + one)
        after = tl.maximum(maximum, other)
        ours, theirs = arithmetic.exp(maximum - after), arithmetic.exp(other - after)
        denominator = tl.fma(tl.load(stats + (at + chunk) * 2 + 1 + one), theirs, denominator * ours)
        added = tl.load(values + (at + chunk) * HEAD_DIM + i, mask=i < HEAD_DIM, other=0.0)
        numerators = tl.fma(added, tl.broadcast_to(theirs, (WIDTH,)), numerators * ours)
        maximum = after
    gate_at = query_gate + token * query_gate_stride + (2 * head + 1) * HEAD_DIM
    gate = tl.load(gate_at + i, mask=i < HEAD_DIM, other=0.0)
    result = numerators * tl.div_rn(1.0, denominator)
    if TYPE == "tq3_0":
        result = triton_turned.turn_back(result)
    result = result * arithmetic.sigmoid(gate)
    tl.store(out + (token * num_heads + head) * HEAD_DIM + i, result, mask=i < HEAD_DIM)


@triton.jit
def prefill_kernel(
    query,
    query_gate,
    k_cache,
    v_cache,
    positions,
    slots,
    out,
    slot_stride,
    position_stride,
    head_stride,
    query_gate_stride,
    num_tokens,
    num_heads,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    """One program: ROWS pairs of a token and a head of key/value head program_id(1), a sequence at a time."""
    kv_head = tl.program_id(1)
    i = tl.arange(0, WIDTH)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.minimum(pair // GROUP, num_tokens - 1)
    head = token.to(tl.int64) * num_heads + kv_head * GROUP + pair % GROUP
    slot = tl.load(slots + token)
    own = tl.load(positions + token)
    start = tl.program_id(0) * ROWS // GROUP
    for leader in range(start, tl.minimum((tl.program_id(0) * ROWS + ROWS - 1) // GROUP + 1, num_tokens)):
        current = tl.load(slots + leader)
        if (leader == start) | (tl.load(slots + tl.maximum(leader - 1, start)) != current):
            active = (slot == current) & (pair < num_tokens * GROUP)
            last = tl.where(active, own, -1)
            first = first_position(own, window)
            lowest = tl.min(tl.where(active, first, 0x7FFFFFFF), axis=0)
            highest = tl.max(last, axis=0)
            base = current.to(tl.int64) * slot_stride + kv_head * head_stride
            maxima = tl.full((ROWS,), NEGATIVE_INFINITY, tl.float32)
            denominators = tl.zeros((ROWS,), tl.float32)
            numerators = tl.zeros((ROWS, WIDTH), tl.float32)
            for chunk in range(lowest // CHUNK * CHUNK, highest + 1, CHUNK):
                other, new_denominators, added = attend_chunk(
                    query, head * HEAD_DIM, first, last, k_cache, v_cache, base, position_stride, chunk,
                    lowest, highest, ROWS, HEAD_DIM, WIDTH, TYPE,
                )  # fmt: skip
                is_first = first >= chunk
                joins = (last >= chunk) & (first < chunk + CHUNK)
                after = tl.where(is_first, other, tl.maximum(maxima, other))
                ours, theirs = arithmetic.exp(maxima - after), arithmetic.exp(other - after)
                merged = tl.fma(new_denominators, theirs, denominators * ours)
                merged = tl.where(is_first, new_denominators, merged)
                denominators = tl.where(joins, merged, denominators)
                theirs = tl.broadcast_to(theirs[:, None], (ROWS, WIDTH))
                joined = tl.fma(added, theirs, numerators * ours[:, None])
                joined = tl.where(is_first[:, None], added, joined)
                numerators = tl.where(joins[:, None], joined, numerators)
                maxima = tl.where(joins, after, maxima)
            mask = active[:, None] & (i < HEAD_DIM)[None, :]
            gate_head = 2 * (kv_head * GROUP + pair % GROUP) + 1
            gate_at = token.to(tl.int64) * query_gate_stride + gate_head * HEAD_DIM
            gate = tl.load(query_gate + gate_at[:, None] + i[None, :], mask=mask, other=0.0)
            result = numerators * tl.div_rn(1.0, denominators)[:, None]
            if TYPE == "tq3_0":
                result = tl.reshape(triton_turned.turn_back(tl.ravel(result)), (ROWS, WIDTH))
            result = result * arithmetic.sigmoid(gate)
            tl.store(out + head[:, None] * HEAD_DIM + i[None, :], result, mask=mask)


def prepare(
    shape: AttentionShape, inputs: AttentionInputs, caches: Caches, rows: Rows, query: torch.Tensor
) -> None:
    """See `AttentionKernels.prepare`."""
    num_units = shape.num_heads + 2 * shape.num_kv_heads
    prepare_kernel[(len(inputs.key), num_units)](
        inputs.query_gate, inputs.key, inputs.value, inputs.q_norm, inputs.k_norm, inputs.angles,
        rows.positions, rows.slots, query, caches.k, caches.v, *_strides(caches),
        inputs.query_gate.stride(0), inputs.key.stride(0), inputs.value.stride(0),
        shape.num_heads, shape.num_kv_heads, inputs.eps,
        ROPE_HALF=inputs.angles.shape[-2], num_warps=1, **_constants(shape),
    )  # fmt: skip


def decode(
    shape: AttentionShape,
    query: torch.Tensor,
    query_gate: torch.Tensor,
    caches: Caches,
    rows: Rows,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
) -> None:
    """See `AttentionKernels.decode`."""
    num_rows, max_chunks, window = len(query), workspace.values.shape[2], shape.window or 0
    decode_kernel[(num_rows, shape.num_kv_heads, DECODE_SPLITS)](
        query, caches.k, caches.v, rows.positions, rows.slots, workspace.values, workspace.stats,
        *_strides(caches), shape.num_heads, shape.num_kv_heads, max_chunks, window,
        GROUP=shape.group_size, ROWS=triton.next_power_of_2(shape.group_size), SPLITS=DECODE_SPLITS,
        num_warps=NUM_WARPS, **_constants(shape),
    )  # fmt: skip
    merge_kernel[(num_rows, shape.num_heads)](
        query_gate, rows.positions, workspace.values, workspace.stats, out, query_gate.stride(0),
        shape.num_heads, max_chunks, window, num_warps=NUM_WARPS, **_constants(shape),
    )  # fmt: skip


def prefill(
    shape: AttentionShape,
    query: torch.Tensor,
    query_gate: torch.Tensor,
    caches: Caches,
    rows: Rows,
    out: torch.Tensor,
) -> None:
    """See `AttentionKernels.prefill`."""
    num_rows = len(query)
    grid = (triton.cdiv(num_rows * shape.group_size, PREFILL_ROWS), shape.num_kv_heads)
    prefill_kernel[grid](
        query, query_gate, caches.k, caches.v, rows.positions, rows.slots, out, *_strides(caches),
        query_gate.stride(0), num_rows, shape.num_heads, shape.window or 0,
        GROUP=shape.group_size, ROWS=PREFILL_ROWS, num_warps=NUM_WARPS, **_constants(shape),
    )  # fmt: skip


def _strides(caches: Caches) -> tuple[int, int, int]:
    """Elements between slots, positions and heads, the same for keys and values."""
    if caches.k.stride() != caches.v.stride():
        raise ValueError("keys and values must be laid out alike")
    slots, positions, heads, _ = caches.k.stride()
    return slots, positions, heads


def _constants(shape: AttentionShape) -> dict[str, int | str | bool]:
    width = max(32, triton.next_power_of_2(shape.head_dim))
    return {
        "HEAD_DIM": shape.head_dim,
        "WIDTH": width,
        "TYPE": shape.cache_type.name,
        "enable_fp_fusion": False,
    }
