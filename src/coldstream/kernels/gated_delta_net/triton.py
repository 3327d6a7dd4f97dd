"""The gated DeltaNet in Triton for any number of rows: prepare all, walk each sequence, finish all."""

import torch
import triton
import triton.language as tl

from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.reference import (
    GROUP_SIZE,
    QuantActivations,
    constant,
    inverse_sqrt,
    padded_cols,
)
from coldstream.kernels.gated_delta_net import exact
from coldstream.kernels.gated_delta_net.arguments import (
    DeltaNetInputs,
    PrefillWorkspace,
    check_arguments,
    sizes,
)
from coldstream.kernels.ops import DeltaNetWeights

NUM_LANES = arithmetic.NUM_LANES
NUM_CHAINS = tl.constexpr(exact.NUM_CHAINS)
L7, L6, L5, L4, L3, L2, L1, L0 = map(tl.constexpr, exact.LOG1P_COEFFICIENTS)
COLUMNS_PER_PROGRAM = 32


@triton.jit
def softplus(x):
    """log(1 + e^x), float32."""
    t = arithmetic.exp(tl.where(x > 0, -x, x))
    s = tl.div_rn(t, t + 2.0)
    z = s * s
    series = tl.fma(z, L7, L6)
    series = tl.fma(series, z, L5)
    series = tl.fma(series, z, L4)
    series = tl.fma(series, z, L3)
    series = tl.fma(series, z, L2)
    series = tl.fma(series, z, L1)
    series = tl.fma(series, z, L0)
    return tl.where(x > 0, x, 0.0) + (2.0 * s) * series


@triton.jit
def convolve(qkv, conv_state, taps, row, in_batch, channels, stride, num_channels, TAPS: tl.constexpr):
    """silu of the convolution of some channels at `row`, which `in_batch` rows of its sequence precede.

    qkv is the address of the batch, conv_state that of the sequence.
    """
    total = tl.zeros(channels.shape, tl.float32)
    # For each channel: some interpreters keep the type of what was compared in a scalar mask.
    rows_before = tl.zeros(channels.shape, tl.int32) + in_batch
    for j in tl.static_range(TAPS):
        back = TAPS - 1 - j
        is_row = rows_before >= back
        x = tl.load(qkv + (row - back) * stride + channels, mask=is_row, other=0.0)
        kept = tl.load(
            conv_state + (j + in_batch) * num_channels + channels, mask=rows_before < back, other=0.0
        )
        x = tl.where(is_row, x, kept)
        total = tl.fma(tl.load(taps + channels * TAPS + j), x, total)
    return arithmetic.silu(total)


@triton.jit
def prepare_gates(
    alpha, beta, a, dt_bias, gates, spans, slots, row, alpha_stride, beta_stride, num_rows, num_heads,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Decay and write strength of all heads of a row, and whether its sequence begins or ends with it."""
    head = tl.arange(0, HEADS)
    is_head = head < num_heads
    x = tl.load(alpha + row * alpha_stride + head, mask=is_head, other=0.0)
    x += tl.load(dt_bias + head, mask=is_head, other=0.0)
    decay = arithmetic.exp(tl.load(a + head, mask=is_head, other=0.0) * softplus(x))
    strength = arithmetic.sigmoid(tl.load(beta + row * beta_stride + head, mask=is_head, other=0.0))
    tl.store(gates + (row * num_heads + head) * 2, decay, mask=is_head)
    tl.store(gates + (row * num_heads + head) * 2 + 1, strength, mask=is_head)
    slot = tl.load(slots + row)
    before = tl.load(slots + row - 1, mask=row > 0, other=-1)
    behind = tl.load(slots + row + 1, mask=row < num_rows - 1, other=-1)
    tl.store(spans + 2 * slot, row.to(tl.int32), mask=before != slot)
    tl.store(spans + 2 * slot + 1, (row + 1).to(tl.int32), mask=behind != slot)


@triton.jit
def prepare_kernel(
    qkv, alpha, beta, taps, a, dt_bias, conv_state, slots, keys, values, gates, spans,
    qkv_stride, alpha_stride, beta_stride, num_rows, num_key_heads, num_value_heads, eps, query_factor,
    D: tl.constexpr, TAPS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program: a head of channels of row program_id(0), or the gates of the row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = 2 * num_key_heads + num_value_heads
    if head == num_heads:
        prepare_gates(
            alpha, beta, a, dt_bias, gates, spans, slots, row, alpha_stride, beta_stride, num_rows,
            num_value_heads, HEADS,
        )  # fmt: skip
        return
    slot = tl.load(slots + row).to(tl.int64)
    in_batch = 0
    for j in tl.static_range(1, TAPS):
        other = tl.load(slots + row - j, mask=row >= j, other=-1)
        in_batch += tl.where((in_batch == j - 1) & (other == slot), 1, 0)
    num_channels = num_heads * D
    kept = conv_state + slot * (TAPS - 1) * num_channels
    if head >= 2 * num_key_heads:
        channels = head * D + tl.arange(0, D)
        x = convolve(qkv, kept, taps, row, in_batch, channels, qkv_stride, num_channels, TAPS)
        tl.store(values + row * num_value_heads * D + channels - 2 * num_key_heads * D, x)
        return
    squares = tl.zeros((NUM_LANES,), tl.float32)
    for i in tl.static_range(0, D, NUM_LANES):
        channels = head * D + i + tl.arange(0, NUM_LANES)
        x = convolve(qkv, kept, taps, row, in_batch, channels, qkv_stride, num_channels, TAPS)
        squares = tl.fma(x, x, squares)
    total = arithmetic.sum_of_sixteen(tl.reshape(squares, (1, NUM_LANES)))
    scale = arithmetic.inverse_sqrt(total + eps)
    factor = tl.where(head < num_key_heads, query_factor, 1.0)
    for i in tl.static_range(0, D, NUM_LANES):
        channels = head * D + i + tl.arange(0, NUM_LANES)
        x = convolve(qkv, kept, taps, row, in_batch, channels, qkv_stride, num_channels, TAPS)
        tl.store(keys + row * 2 * num_key_heads * D + channels, x * scale * factor)


@triton.jit
def sum_of_chains(chains):
    """[4, N] → [N]: (c0 + c1) + (c2 + c3)."""
    pairs = tl.reshape(chains, (2, 2, chains.shape[1]))
    even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
    low, high = tl.split(tl.permute(even + odd, (1, 0)))
    return low + high


@triton.jit
def load_chains(vector, m, COLUMNS: tl.constexpr):
    """Entries 4 m … 4 m + 3 of a vector over the key dimension, one for each chain: [4, COLUMNS]."""
    entries = tl.load(vector + m * NUM_CHAINS + tl.arange(0, NUM_CHAINS))
    return tl.broadcast_to(entries[:, None], (NUM_CHAINS, COLUMNS))


@triton.jit
def keep_inputs(qkv, conv_state, channels, first, end, stride, num_channels, TAPS: tl.constexpr):
    """The last taps − 1 raw inputs of some channels of a sequence, which is rows first … end − 1."""
    num_rows = end - first
    rows_of_all = tl.zeros(channels.shape, tl.int32) + num_rows.to(tl.int32)  # as in `convolve`
    for i in tl.static_range(TAPS - 1):
        back = TAPS - 1 - i
        is_row = rows_of_all >= back
        x = tl.load(qkv + (end - back) * stride + channels, mask=is_row, other=0.0)
        kept = tl.load(
            conv_state + (i + num_rows) * num_channels + channels, mask=rows_of_all < back, other=0.0
        )
        tl.store(conv_state + i * num_channels + channels, tl.where(is_row, x, kept))


@triton.jit
def walk(state, keys, values, gates, raw, first, end, key_stride, value_stride, gate_stride, query_width,
         D: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Rows first … end − 1 over the columns from `state` on; the other addresses are those of row 0."""
    column = tl.arange(0, COLUMNS)
    places = state + tl.arange(0, NUM_CHAINS)[:, None] * D + column[None, :]
    s = ()
    for m in tl.static_range(D // NUM_CHAINS):
        s = s + (tl.load(places + m * NUM_CHAINS * D),)  # noqa: RUF005
    for row in range(first, end):
        query = keys + row * key_stride
        key = query + query_width
        decay = tl.load(gates + row * gate_stride)
        strength = tl.load(gates + row * gate_stride + 1)
        decayed = ()
        chains = tl.zeros((NUM_CHAINS, COLUMNS), tl.float32)
        for m in tl.static_range(D // NUM_CHAINS):
            x = s[m] * decay
            chains = tl.fma(load_chains(key, m, COLUMNS), x, chains)
            decayed = decayed + (x,)  # noqa: RUF005
        value = tl.load(values + row * value_stride + column)
        change = strength * (value - sum_of_chains(chains))
        changes = tl.broadcast_to(change[None, :], (NUM_CHAINS, COLUMNS))
        s = ()
        chains = tl.zeros((NUM_CHAINS, COLUMNS), tl.float32)
        for m in tl.static_range(D // NUM_CHAINS):
            x = tl.fma(load_chains(key, m, COLUMNS), changes, decayed[m])
            chains = tl.fma(load_chains(query, m, COLUMNS), x, chains)
            s = s + (x,)  # noqa: RUF005
        tl.store(raw + row * value_stride + column, sum_of_chains(chains))
    for m in tl.static_range(D // NUM_CHAINS):
        tl.store(places + m * NUM_CHAINS * D, s[m])


@triton.jit
def recurrence_kernel(
    qkv, keys, values, gates, raw, spans, key_head_ids, conv_state, state,
    qkv_stride, num_key_heads, num_value_heads,
    D: tl.constexpr, TAPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of a head's state, of the sequence in slot program_id(1)."""
    slot = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // (D // COLUMNS)
    column = tl.program_id(0) % (D // COLUMNS) * COLUMNS
    first = tl.load(spans + 2 * slot).to(tl.int64)
    end = tl.load(spans + 2 * slot + 1).to(tl.int64)
    if end == 0:
        return
    num_channels = (2 * num_key_heads + num_value_heads) * D
    kept = conv_state + slot * (TAPS - 1) * num_channels
    channels = head * D + column + tl.arange(0, COLUMNS)
    keep_inputs(qkv, kept, channels + 2 * num_key_heads * D, first, end, qkv_stride, num_channels, TAPS)
    if head < num_key_heads:  # and the query and key head of the same number
        keep_inputs(qkv, kept, channels, first, end, qkv_stride, num_channels, TAPS)
        keep_inputs(qkv, kept, channels + num_key_heads * D, first, end, qkv_stride, num_channels, TAPS)
    at = head * D + column
    walk(
        state + (slot * num_value_heads + head) * D * D + column,
        keys + tl.load(key_head_ids + head) * D,
        values + at, gates + 2 * head, raw + at, first, end,
        2 * num_key_heads * D, num_value_heads * D, 2 * num_value_heads, num_key_heads * D, D, COLUMNS,
    )  # fmt: skip


@triton.jit
def output_kernel(
    raw, z, norm, out, q, scales, sums, spans, z_stride, width, eps, num_spans,
    D: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, FLOATS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """One program: 256 output columns of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if (row == 0) & (group == 0):
        span = tl.arange(0, SPANS)
        tl.store(spans + span, tl.zeros((SPANS,), tl.int32), mask=span < num_spans)
    head = tl.arange(0, GROUP // D)[:, None]
    first = group * GROUP + head * D
    squares = tl.zeros((GROUP // D, NUM_LANES), tl.float32)
    for i in tl.static_range(0, D, NUM_LANES):
        at = first + i + tl.arange(0, NUM_LANES)[None, :]
        x = tl.load(raw + row * width + at, mask=at < width, other=0.0)
        squares = tl.fma(x, x, squares)
    total = arithmetic.sum_of_sixteen(squares)
    scale = arithmetic.inverse_sqrt(tl.div_rn(total, D * 1.0) + eps)
    at = first + tl.arange(0, D)[None, :]
    x = tl.load(raw + row * width + at, mask=at < width, other=0.0)
    gate = tl.load(z + row * z_stride + at, mask=at < width, other=0.0)
    y = x * scale[:, None] * tl.load(norm + tl.arange(0, D))[None, :] * arithmetic.silu(gate)
    if FLOATS:
        tl.store(out + row * width + at, y, mask=at < width)
    if CODES:
        codes, group_scale, sum16 = arithmetic.quantize_groups(tl.reshape(y, (1, GROUP)))
        place = row * tl.num_programs(1) + group
        tl.store(q + place * GROUP + tl.arange(0, GROUP)[None, :], codes)
        tl.store(scales + place + tl.arange(0, 1), group_scale)
        tl.store(sums + place * (GROUP // 16) + tl.arange(0, GROUP // 16)[None, :], sum16)


def delta_net(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor | None,
    quantized: QuantActivations | None,
    workspace: PrefillWorkspace,
) -> None:
    """`Ops.gated_delta_net` in three launches; the contract of `delta_net_decode_cuda`."""
    check_arguments(inputs, weights, conv_state, state, out, quantized)
    num_rows, num_heads, size, taps = sizes(inputs, weights, state)
    if num_rows == 0:
        return
    i, w, work = inputs, weights, workspace
    prepare_kernel[(num_rows, 2 * w.num_key_heads + num_heads + 1)](
        i.qkv, i.alpha, i.beta, w.conv_taps, w.a, w.dt_bias, conv_state, i.rows.slots,
        work.keys, work.values, work.gates, work.spans,
        i.qkv.stride(0), i.alpha.stride(0), i.beta.stride(0), num_rows, w.num_key_heads, num_heads, w.eps,
        inverse_sqrt(constant(size)).item(),
        D=size, TAPS=taps, HEADS=triton.next_power_of_2(num_heads), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    recurrence_kernel[(num_heads * size // COLUMNS_PER_PROGRAM, state.shape[0])](
        i.qkv, work.keys, work.values, work.gates, work.raw, work.spans, w.key_head_ids, conv_state, state,
        i.qkv.stride(0), w.num_key_heads, num_heads,
        D=size, TAPS=taps, COLUMNS=COLUMNS_PER_PROGRAM, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    width, slots = num_heads * size, state.shape[0]
    parts = (None, None, None) if quantized is None else (quantized.q, quantized.scales, quantized.sums)
    output_kernel[(num_rows, padded_cols(width) // GROUP_SIZE)](
        work.raw, i.z, w.norm, out, *parts, work.spans, i.z.stride(0), width, w.eps, 2 * slots,
        D=size, GROUP=GROUP_SIZE, SPANS=triton.next_power_of_2(2 * slots),
        FLOATS=out is not None, CODES=quantized is not None, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
