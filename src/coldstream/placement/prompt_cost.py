"""The cost of a prompt in seconds, from bytes, rows, measured rates and what is resident. Pure.

On a GPU an expert's rows are multiplied in tiles. A tile's weights are unpacked once, whatever its rows, so
that one row of an expert costs more than half of a tile. Missing experts are copied over the
bus, while the CPU computes those with the fewest rows. A step that the host divides takes as long as the
slowest of four: bus, GPU, CPU, and the thread that launches its kernels.

The constants are from docs/results/gpu on H200s; docs/notes/startup.md says how they were found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_SHARED_ROWS
from coldstream.placement.cost import (
    expert_seconds,
    rates_of_experts,
    staged_per_s,
)
from coldstream.placement.gpu_types import GPU_TIMES
from coldstream.placement.rates import Rates
from coldstream.placement.sizes import BUFFER_BYTES, MIN_BUFFERS, NOVELTY, SHARE_WITH_PLACES, ModelSizes

Array = np.ndarray[Any, Any]

PROMPT_LAUNCHES: Final = 23.4  # of a layer
# Of a step whose launches are recorded: what a layer takes the host between its graphs, and a group, in
# launches.
RECORDED_LAUNCHES: Final = 18
RECORDED_GROUP_LAUNCHES: Final = 1.5
MAX_RECORDED_ROWS: Final = 2048  # most rows of such a step
TILE_ROWS: Final = 64  # of an expert that are multiplied together
UNPACK_SHARE: Final = 0.66  # of a whole tile's time: what it takes for its weights, whatever its rows
ATTENTION_SHARE: Final = 0.18  # of the rate of large matrices: attention
# What the copies of a group take the thread that launches what no graph has, in launches. Where the CPU
# computes experts, a group has many short copies.
COPY_LAUNCHES: Final = 1.4
COPIES_LAUNCHES: Final = 3
GROUP_LAUNCHES: Final = 5  # of a group: its addresses, its tiles, two products, and what is between these
# Operations of a layer on a CPU that add as many values as a row has, beside those that sum up its experts:
# two norms, and two sums.
CPU_ROW_OPS: Final = 4
STATE_BYTES: Final = 4  # of a value of a recurrent state
# Tokens of a prefill step for which the CPU has room in any case. In longer ones a GPU often takes longer
# than the bus. There is room for them where they are sooner over with the CPU.
MAX_CPU_ROWS: Final = 2048
MOST_CPU_ROWS: Final = 8192
WORTH_ROOM: Final = 0.85  # of a longer step's time without the CPU's part


def prefill_seconds(
    model: ModelSizes,
    rates: Rates,
    resident: Array,
    uses: Array | None,
    num_tokens: int,
    chunk_size: int,
    on_disk: Array | None = None,
    ring_bytes: int | None = None,
) -> float:
    """Seconds for a prompt with a GPU. resident: bool [layers, experts]; uses as in `plan_placement`.

    on_disk: as `resident`, the experts that are only there; None: none are. ring_bytes: of the ring through
    which experts are copied; None: it is large.
    """
    seconds = 0.0
    for step in prompt_steps(model, uses, num_tokens, chunk_size):
        compute = _gpu_seconds(model, rates, step)
        spread = np.ones_like(step.rows) if uses is not None else _spread(resident)
        ring = _ring_of(model, ring_bytes)
        with_cpu, without = _step_seconds(model, rates, step, compute, spread, ~resident, ring)
        has_room = step.count <= MAX_CPU_ROWS or with_cpu <= WORTH_ROOM * without
        step_s = min(with_cpu, without) if has_room else without
        if on_disk is not None:
            read_s = float((step.touched * _sizes(model))[on_disk].sum()) / rates.disk_bytes_per_s
            step_s = max(
                step_s, read_s * (1 + 1 / model.num_layers)
            )  # the first layer's overlap with nothing
        seconds += step_s
    return seconds


def rows_with_cpu(
    model: ModelSizes, rates: Rates, resident: Array, chunk_size: int, ring_bytes: int | None = None
) -> int:
    """Most rows of a prefill step in which the CPU is to have a part. Arguments as of `prefill_seconds`."""
    found, spread, ring = min(MAX_CPU_ROWS, chunk_size), _spread(resident), _ring_of(model, ring_bytes)
    while 2 * found <= min(chunk_size, MOST_CPU_ROWS):
        (step,) = prompt_steps(model, None, 2 * found, 2 * found)
        compute = _gpu_seconds(model, rates, step)
        with_cpu, without = _step_seconds(model, rates, step, compute, spread, ~resident, ring)
        if with_cpu > WORTH_ROOM * without:
            break
        found *= 2
    return found


@dataclass(frozen=True)
class PromptStep:
    """`count` rows of a prompt behind `start` positions, which are computed together.

    rows: what each expert gets, float64 [layers, experts]. touched: the odds that it gets any, likewise.
    """

    start: int
    count: int
    rows: Array
    touched: Array


def prompt_steps(
    model: ModelSizes, uses: Array | None, num_tokens: int, chunk_size: int
) -> Iterator[PromptStep]:
    """The steps of a prompt, of at most `chunk_size` rows. uses: as in `plan_placement`."""
    for start in range(0, num_tokens, chunk_size):
        count = min(chunk_size, num_tokens - start)
        rows = expected_rows(model, uses, count)
        yield PromptStep(start, count, rows, expected_touched(rows, count, model.novelty))


def _gpu_seconds(model: ModelSizes, rates: Rates, step: PromptStep) -> float:
    """Seconds of a step, if all experts are resident."""
    rows, touched = step.rows, step.touched
    moved = float((touched * _sizes(model)).sum()) + model.dense_token_bytes
    tiles = touched * np.maximum(1.0, rows / np.maximum(touched, 1e-9) / TILE_ROWS + 0.5)
    multiplied = UNPACK_SHARE * TILE_ROWS * tiles + (1 - UNPACK_SHARE) * rows
    of_experts = float((multiplied.sum(axis=1) * _expert_weights(model)).sum())
    weights = step.count * _dense_weights(model) + of_experts
    pairs = model.attention_elements(step.start, step.count)
    return (
        model.num_layers * PROMPT_LAUNCHES * rates.shares.launch_s
        + moved / (rates.shares.vram * rates.vram_bytes_per_s)
        + 2 * weights / (rates.shares.products * rates.product_ops_per_s)
        + 4 * pairs / (ATTENTION_SHARE * rates.product_ops_per_s)
    )


def _dense_weights(model: ModelSizes) -> float:
    """Weights outside experts that a row of a prompt meets, of as many of MEASURED_TYPE as take a GPU as
    long.
    """
    experts = model.num_experts_per_tok * model.num_layers * model.expert_parameters
    further = sum((GPU_TIMES[each.quant_type].prompt - 1) * each.num_values for each in model.dense_products)
    head = model.head
    if head is not None:
        further -= (GPU_TIMES[head.quant_type].prompt if model.dense_products else 1) * head.num_values
    return model.token_parameters - experts + further


def _expert_weights(model: ModelSizes) -> Array:
    """The same of an expert, float64 [layers]."""
    weights = np.full(model.num_layers, float(model.expert_parameters))
    for layer in range(model.num_layers):
        products = model.products_of_expert(layer)
        if products:
            times = (GPU_TIMES[each.quant_type].experts_prompt * each.num_values for each in products)
            weights[layer] = sum(times)
    return weights


def _spread(resident: Array) -> Array:
    """What a missing expert gets over the mean of its layer, float64 [layers, experts], in some order.

    A prompt is of some subject: the rows of a layer's experts are spread evenly from none to twice the mean.
    """
    number = np.cumsum(~resident, axis=1)
    count = np.maximum(1, number[:, -1:])
    return np.asarray((2 * number - 1) / count)


@dataclass(frozen=True)
class _Ring:
    """What a ring for copies does to steps."""

    num_bytes: int
    most_shared: int  # rows of a step that the device divides
    group: int  # experts of a copy that the host begins

    def bus_seconds(self, copied: Array, compute: float, num_layers: int, link_bytes_per_s: float) -> Array:
        """Seconds until experts are there that take the bus so many, beside a GPU that computes for others.

        While it does, copies of the next layer fill the ring. What the ring does not hold comes behind that.
        """
        held = num_layers * self.num_bytes / link_bytes_per_s
        return np.maximum(copied, compute + np.maximum(0.0, copied - held))


def _ring_of(model: ModelSizes, ring_bytes: int | None) -> _Ring:
    largest = max(model.expert_bytes)
    if ring_bytes is None:
        ring_bytes = model.num_experts * largest
    has_places = ring_bytes >= SHARE_WITH_PLACES * model.num_experts * largest
    buffer = ring_bytes // max(MIN_BUFFERS, ring_bytes // BUFFER_BYTES)
    most_shared = MAX_SHARED_ROWS if has_places else MAX_MAILBOX_ROWS
    return _Ring(ring_bytes, most_shared, max(1, buffer // largest))


def _step_seconds(
    model: ModelSizes,
    rates: Rates,
    step: PromptStep,
    compute: float,
    spread: Array,
    missing: Array,
    ring: _Ring,
) -> tuple[float, float]:
    """Seconds of a step whose `missing` experts, bool [layers, experts], are copied or computed by the CPU,
    and where all are copied. A run tries both ways.

    compute: of the step with all experts. spread: see `_spread`. The fastest split of the missing experts is
    the run's.
    """
    if not missing.any():
        return compute, compute
    count, touched = step.count, step.touched
    num_bytes = (touched * _sizes(model))[missing]
    num_experts = float(touched[missing].sum())
    copied = float(num_bytes.sum()) / rates.link_bytes_per_s
    groups = num_experts / ring.group
    launches = float(_launching_seconds(model, rates, count, np.asarray(groups), COPY_LAUNCHES))
    on_bus = partial(ring.bus_seconds, compute=compute, num_layers=model.num_layers)
    alone = float(on_bus(np.asarray(copied), link_bytes_per_s=rates.link_bytes_per_s))
    without_cpu = max(alone, launches) + copied / model.num_layers
    if count > MOST_CPU_ROWS:
        return without_cpu, without_cpu
    parts = _cpu_parts(model, rates, step, spread, missing)
    left = parts.read[-1] - parts.read
    # The bus loses some of its rate to every byte that the CPU reads.
    lost = parts.read * (rates.link_bytes_per_s - rates.link_beside_read) / rates.read_beside_link
    if count > ring.most_shared:  # divided by the host; copies begin ahead of the router
        share = left / parts.read[-1]
        launching = _launching_seconds(model, rates, count, share * groups, COPIES_LAUNCHES)
        # Rows go to the CPU, and those that it adds come back beside copies, while it has nothing to do.
        sent = model.num_layers * (rates.answer_s + count * model.row_bytes / rates.link_bytes_per_s)
        back = parts.rows * model.row_bytes / rates.link_bytes_per_s
        copies = share * copied + lost / rates.link_bytes_per_s + back
        both = np.maximum(
            parts.seconds + compute + sent + back, on_bus(copies, link_bytes_per_s=rates.link_bytes_per_s)
        )
        return float(np.maximum(both, launching).min()), without_cpu
    shared = compute + float(np.maximum(parts.seconds, left / staged_per_s(rates)).min())
    return shared, shared


@dataclass(frozen=True)
class _CpuParts:
    """By how many of the missing experts the CPU computes, from none to all, those first that take it least.

    Of equal ones those of the fewest rows. Float64 [experts + 1]: its seconds, the bytes that it reads, and
    the rows of all these experts.
    """

    seconds: Array
    read: Array
    rows: Array


def _cpu_parts(model: ModelSizes, rates: Rates, step: PromptStep, spread: Array, missing: Array) -> _CpuParts:
    rows = step.rows * spread
    of_touched = rows / np.maximum(step.touched, 1e-9)
    seconds = (step.touched * _cpu_seconds(model, rates, of_touched))[missing]
    read = (step.touched * _sizes(model))[missing]
    order = np.lexsort((rows[missing], seconds / read))
    parts = (np.concatenate([[0.0], np.cumsum(each[order])]) for each in (seconds, read, rows[missing]))
    return _CpuParts(*parts)


def _launching_seconds(model: ModelSizes, rates: Rates, count: int, groups: Array, of_copies: float) -> Array:
    """Seconds of the thread that launches a step of `count` rows, with so many groups of copies."""
    is_recorded = count <= MAX_RECORDED_ROWS
    of_layer = RECORDED_LAUNCHES if is_recorded else PROMPT_LAUNCHES
    of_group = RECORDED_GROUP_LAUNCHES if is_recorded else GROUP_LAUNCHES
    launches = model.num_layers * of_layer + groups * (of_group + of_copies)
    return np.asarray(rates.shares.queue_s * launches)


def _cpu_seconds(model: ModelSizes, rates: Rates, rows: Array) -> Array:
    """Seconds of all cores for an expert of so many rows, float64 [layers, experts]."""
    found = np.empty_like(rows)
    for layer, size in enumerate(model.expert_bytes):
        of_layer = rates_of_experts(rates, size, model.products_of_expert(layer))
        times = expert_seconds(size, of_layer)
        of_some = np.interp(rows[layer], np.arange(1, MAX_MAILBOX_ROWS + 1), times)
        found[layer] = of_some * np.maximum(1.0, rows[layer] / MAX_MAILBOX_ROWS)
    sizes = _sizes(model)
    return np.maximum(found, sizes / (rates.row_share * rates.read_beside_link))


def prefill_seconds_on_cpu(
    model: ModelSizes, rates: Rates, resident: Array, uses: Array | None, num_tokens: int, chunk_size: int
) -> float:
    """`prefill_seconds` if RAM is the fast memory and other experts are read from the disk."""
    seconds = 0.0
    for step in prompt_steps(model, uses, num_tokens, chunk_size):
        touched = step.touched * _sizes(model)
        products = _prompt_product_seconds(model, rates, step.count, step.touched.sum(axis=1))
        read = (float(touched.sum()) + model.dense_bytes) / (rates.row_share * rates.read_bytes_per_s)
        compute = max(read, products + _mixing_seconds(model, rates, step))
        seconds += max(compute, float(touched[~resident].sum()) / rates.disk_bytes_per_s)
    return seconds


def _mixing_seconds(model: ModelSizes, rates: Rates, step: PromptStep) -> float:
    """Seconds of what all cores do between products: attention, recurrent states, and rows."""
    mixers = rates.mixer_rates
    values = model.num_layers * model.hidden_size * (CPU_ROW_OPS + model.num_experts_per_tok)
    return (
        model.attention_elements(step.start, step.count) / mixers.pairs_per_s
        + step.count * model.state_bytes / STATE_BYTES / mixers.state_values_per_s
        + step.count * values / mixers.row_values_per_s
    )


def _prompt_product_seconds(model: ModelSizes, rates: Rates, count: int, touched: Array) -> float:
    """Seconds of all products of `count` rows on all cores. touched: experts with any row, by layer."""
    if not model.dense_products or not rates.product_values_per_s:
        return 2 * count * model.token_parameters / rates.cpu_ops_per_s
    seconds = sum(
        rates.product_seconds(each.quant_type, each.num_values, count) for each in model.dense_products
    )
    if model.head is not None:  # which only the last row meets
        head = model.head
        seconds -= rates.product_seconds(head.quant_type, head.num_values, count)
        seconds += rates.product_seconds(head.quant_type, head.num_values, 1)
    pairs = count * model.num_experts_per_tok
    for layer in range(model.num_layers if pairs else 0):
        num_experts = max(1.0, float(touched[layer]))
        seconds += num_experts * sum(
            rates.product_seconds(each.quant_type, each.num_values, pairs / num_experts)
            for each in model.products_of_expert(layer)
        )
    return seconds


def _sizes(model: ModelSizes) -> Array:
    sizes = np.asarray(model.expert_bytes, np.float64)[:, None]
    return np.broadcast_to(sizes, (model.num_layers, model.num_experts))


def expected_rows(model: ModelSizes, uses: Array | None, count: int) -> Array:
    """Rows that each expert gets of `count` tokens, float64 [layers, experts]."""
    shape = (model.num_layers, model.num_experts)
    weights = np.ones(shape) if uses is None else np.asarray(uses, np.float64) + 1e-9
    odds = model.num_experts_per_tok * weights / weights.sum(axis=1, keepdims=True)
    rows: Array = count * np.minimum(odds, 1.0)
    return rows


def expected_touched(rows: Array, count: int, novelty: float = NOVELTY) -> Array:
    """The probability that an expert gets any row. Neighbouring tokens choose alike: see NOVELTY."""
    touched: Array = 1.0 - (1.0 - rows / count) ** count**novelty
    return touched
