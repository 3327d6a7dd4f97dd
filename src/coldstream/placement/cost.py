"""The cost of a token in seconds, from bytes, measured rates and hit rates. Pure.

A layer of decode has a fixed part (mixer, router, norms: bytes of GPU memory, and launches) and experts. The
GPU computes resident experts. Meanwhile the CPU computes others in RAM, and the GPU reads more over the bus.
Prompts are in `prompt_cost.py`.

What kernels reach of measured rates is in `kernel_shares.py`. The constants here are counts of launches, what
machines without a measurement are taken to reach, from docs/results/gpu on H200s, and the recall of guesses,
from docs/results/guess_recall.json.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb
from typing import Any, Final

import numpy as np

from coldstream.kernels.experts.shapes import EXPERT_ROWS, MAX_MAILBOX_ROWS, MEASURED_TYPE
from coldstream.kernels.experts.split import MAX_NS, WHOLE, MissTimes
from coldstream.placement.gpu_types import GPU_TIMES
from coldstream.placement.rates import Rates
from coldstream.placement.sizes import ModelSizes, Products

Array = np.ndarray[Any, Any]

LAYER_LAUNCHES: Final = 8.65  # each as long as a short kernel in a captured graph
EXPERT_LAUNCHES: Final = 2  # per layer: gate and up, down
DENSE_LAUNCHES: Final = 2  # per layer that multiply other weights: the mixer's inputs and its output
JOIN_LAUNCHES: Final = 0.3667  # per layer that may miss: sharing its experts out, and polling for an answer
KV_SHARE: Final = 0.45  # of a copy's rate in GPU memory: attention of one row
DISK_WAIT_S: Final = 4.5e-4  # per layer that misses: waking readers, and the disk's latency
# Operations of a layer on a CPU that all threads begin and end together: the mixer, what is before and behind
# it, the router, the experts, and three of the shared expert.
CPU_LAYER_OPS: Final = 8
# Python between two steps of a CPU, in calls of an operation: what chooses a token, and says what is next.
CPU_STEP_CALLS: Final = 24
# Bytes a second of MEASURED_TYPE that kernels of one row ask for over the bus, unless more were measured.
# They ask as fast as they multiply, so that types of more instructions, and of fewer bytes, leave some of it.
ROW_BUS_BYTES: Final = 4.4e10
# Products of several rows on a CPU that was not measured, in one row's time: by further rows, and on tiles.
PRODUCT_OF_ROW: Final = 0.4
PRODUCT_OF_TILE: Final = 3.0
PRODUCT_OF_TILE_ROW: Final = 0.03
PREFETCHED: Final = 3  # experts of a layer that have places on the device before their router has run
GUESSED: Final = 0.74  # share of missing experts that are guessed two layers ahead, in a trained model
GUESS_LAUNCHES: Final = 0.6  # per layer: a second router in its router's launch, and a fork of the graph
# Copies into slots beside a step. More would take memory bandwidth from the CPU's experts
# (docs/notes/offloaded-experts.md).
COPY_BYTES_PER_STEP: Final = 64 * 2**20
_ROWS: Final = range(1, MAX_MAILBOX_ROWS + 1)


@dataclass(frozen=True)
class ExpertRates(Rates):
    """`Rates` of a machine for experts of some types of weights: see `rates_of_experts`."""

    row_bus_bytes_per_s: float = math.inf  # by the instructions of these types


@dataclass(frozen=True)
class Split:
    """How many missed experts of a layer the CPU and the bus take, and the seconds."""

    num_cpu: int
    num_bus: int
    seconds: float


def split_misses(num_misses: int, expert_bytes: int, rates: Rates, *, streams: bool = True) -> Split:
    """The fastest way to share `num_misses` experts of a token between the CPU and the bus.

    streams: whether the GPU may read them over the bus.
    """
    num_bus = _shares_of_bus(num_misses, expert_bytes, rates)[-1] if streams else 0
    num_cpu = num_misses - num_bus
    return Split(num_cpu, num_bus, _cold_seconds(num_cpu, num_bus, expert_bytes, rates))


@lru_cache(maxsize=256)
def _shares_of_bus(most_misses: int, expert_bytes: int, rates: Rates) -> tuple[int, ...]:
    """`MissTimes.by_misses`, which a forecast asks for thousands of times."""
    return miss_times(expert_bytes, rates).by_misses(most_misses)


def miss_times(
    expert_bytes: int, rates: Rates, *, is_layer: bool = False, products: Sequence[Products] = ()
) -> MissTimes:
    """How long the CPU and the bus take for a missing expert. A step's missing experts are shared by these
    times.

    is_layer: whether the expert is the FFN of a dense layer, which the copy engine copies. products: of such
    a layer.
    """
    alone, beside = _misses_per_s(rates), _misses_per_s(rates, beside_link=True)
    bus_alone, bus_beside = _row_bus_per_s(rates), _row_bus_per_s(rates, beside_cpu=True)
    staged = staged_per_s(rates)
    if is_layer:
        bus_alone = bus_beside = staged = rates.link_bytes_per_s  # the CPU does not read at full speed
        by_rows = _layer_product_seconds(expert_bytes, products, rates)
    else:
        by_rows = expert_seconds(expert_bytes, rates)
    return MissTimes(
        _nanoseconds(expert_bytes / staged),
        tuple(_nanoseconds(max(expert_bytes / beside, seconds)) for seconds in by_rows),
        round(1e9 * rates.answer_s),
        _share(bus_beside, bus_alone),
        _share(beside, alone),
        _nanoseconds(expert_bytes / bus_beside),
    )


def miss_times_of(model: ModelSizes, rates: Rates, *, is_layer: bool = False) -> MissTimes:
    """`miss_times` of the model's largest experts, with what the CPU takes for their types."""
    size = max(model.expert_bytes)
    products = model.products_of_expert(model.expert_bytes.index(size))
    of_experts = rates_of_experts(rates, size, products)
    times = miss_times(size, of_experts, is_layer=is_layer, products=products)
    return times if is_layer else replace(times, layer=_nanoseconds(_layer_seconds(model, rates)))


def _layer_seconds(model: ModelSizes, rates: Rates) -> float:
    """A token's, of a layer whose experts are all on the GPU."""
    token_s = decode_seconds(model, rates, [1.0] * model.num_layers)
    return (token_s - head_seconds(model, rates)) / model.num_layers


def head_seconds(model: ModelSizes, rates: Rates) -> float:
    """A token's, of the head, which is behind all layers; 0 where its weights are not known."""
    if model.head is None:
        return 0.0
    known = (model.head,) if model.dense_products else ()
    num_bytes = _bytes_on_gpu(model.head.num_bytes, known, are_experts=False)
    return num_bytes / (rates.shares.vram * rates.vram_bytes_per_s)


def unstamped_seconds(model: ModelSizes, rates: Rates) -> float:
    """A token's, of a model with routed experts: before the first layer's router, and behind all layers."""
    chosen, on_gpu = model.num_experts_per_tok, [1.0] * model.num_layers
    experts_s = sum(
        count * _layer_experts_seconds(size, hit_rate, chosen, of_layer, streams=True)
        for count, size, hit_rate, of_layer in _kinds_of_layers(model, on_gpu, rates)
    )
    return head_seconds(model, rates) + _layer_seconds(model, rates) - experts_s / model.num_layers


def expert_seconds(expert_bytes: int, rates: Rates) -> Array:
    """The CPU's time for an expert of 1, 2, … MAX_MAILBOX_ROWS rows, float64, ascending."""
    if not rates.expert_bytes_per_s:
        return _assumed_seconds(expert_bytes, rates.cpu_bytes_per_s)
    measured = expert_bytes / np.asarray(rates.expert_bytes_per_s)
    return np.maximum.accumulate(np.interp(_ROWS, EXPERT_ROWS, measured))


def _layer_product_seconds(num_bytes: int, products: Sequence[Products], rates: Rates) -> Array:
    """The same of the FFN of a dense layer, whose products all cores share."""
    if not products or not rates.product_values_per_s:
        return _assumed_seconds(num_bytes, _cpu_bytes_per_s(rates))
    seconds = [_typed_seconds(products, rows, _cpu_bytes_per_s(rates), rates) for rows in _ROWS]
    return np.maximum.accumulate(seconds)


def _assumed_seconds(expert_bytes: int, cpu_bytes_per_s: float) -> Array:
    """The same by what a CPU multiplies by one row."""
    further = np.asarray(_ROWS) - 1
    of_rows = np.minimum(1 + PRODUCT_OF_ROW * further, PRODUCT_OF_TILE + PRODUCT_OF_TILE_ROW * further)
    return np.asarray(of_rows * expert_bytes / cpu_bytes_per_s)


def _nanoseconds(seconds: float) -> int:
    return min(max(1, round(1e9 * seconds)), MAX_NS)


def _share(slower: float, faster: float) -> int:
    return min(max(1, round(WHOLE * slower / faster)), WHOLE)


def decode_seconds(
    model: ModelSizes,
    rates: Rates,
    hit_rates: Sequence[float],
    context: int = 0,
    *,
    streams: bool = True,
) -> float:
    """Expected seconds a token with a GPU, `context` tokens into a sequence. hit_rates: of each layer.

    streams: whether the GPU may read missing experts over the bus.
    """
    launches = model.num_layers * (LAYER_LAUNCHES - EXPERT_LAUNCHES)
    seconds = (launches + _slower_launches(model)) * rates.shares.launch_s
    dense_bytes = _bytes_on_gpu(model.dense_token_bytes, model.dense_products, are_experts=False)
    seconds += (dense_bytes + model.state_bytes) / (rates.shares.vram * rates.vram_bytes_per_s)
    seconds += model.cached_bytes(context) / (KV_SHARE * rates.vram_bytes_per_s)
    if model.is_dense:
        return seconds + _layers_seconds(model, rates, hit_rates)
    chosen = model.num_experts_per_tok
    return seconds + sum(
        count * _layer_experts_seconds(size, hit_rate, chosen, of_layer, streams=streams)
        for count, size, hit_rate, of_layer in _kinds_of_layers(model, hit_rates, rates)
    )


def _layer_experts_seconds(size: int, hit_rate: float, chosen: int, rates: Rates, *, streams: bool) -> float:
    """Of the experts of a layer in `decode_seconds`."""
    odds = _binomial(chosen, 1.0 - hit_rate)
    seconds = sum(
        odd * _experts_seconds(chosen - misses, misses, size, rates, streams=streams)
        for misses, odd in enumerate(odds)
    )
    return seconds + (JOIN_LAUNCHES * rates.shares.launch_s if hit_rate < 1.0 else 0.0)


def prefetch_gain(model: ModelSizes, rates: Rates, hit_rates: Sequence[float]) -> float:
    """Seconds per token that prefetching up to PREFETCHED experts of a layer saves; may be negative.

    As many are copied as come in time (`MissTimes.by_fetches`), and of the others the bus reads none: the CPU
    computes them, beside copies for later layers. Each guess is right by itself, with the odds of GUESSED.
    """
    if model.is_dense:
        return 0.0
    layer_s, chosen = _layer_seconds(model, rates), model.num_experts_per_tok
    return sum(
        count * _layer_prefetch_gain(size, hit_rate, chosen, layer_s, of_layer)
        for count, size, hit_rate, of_layer in _kinds_of_layers(model, hit_rates, rates)
        if hit_rate < 1.0
    )


def _layer_prefetch_gain(size: int, hit_rate: float, chosen: int, layer_s: float, rates: Rates) -> float:
    """Of one layer in `prefetch_gain`. layer_s: the time of a layer that misses no expert."""
    fetched = _fetches(chosen, size, rates, _nanoseconds(layer_s))
    gain = -GUESS_LAUNCHES * rates.shares.launch_s
    for misses, odd in enumerate(_binomial(chosen, 1.0 - hit_rate)):
        copied = min(fetched[misses], PREFETCHED)
        after = sum(
            odd_of_right
            * max(
                _resident_seconds(chosen - misses + right, size, rates),
                _seconds_beside_copies(misses - right, copied, size, rates),
            )
            for right, odd_of_right in enumerate(_binomial(copied, GUESSED))
        )
        gain += odd * (_experts_seconds(chosen - misses, misses, size, rates) - after)
    return gain


@lru_cache(maxsize=256)
def _fetches(most_misses: int, expert_bytes: int, rates: Rates, layer_ns: int) -> tuple[int, ...]:
    """`MissTimes.by_fetches` of layers that take so long without a missing expert."""
    return replace(miss_times(expert_bytes, rates), layer=layer_ns).by_fetches(most_misses, GUESSED)


def disk_seconds(model: ModelSizes, rates: Rates, disk_rates: Sequence[float]) -> float:
    """Seconds that a token waits for the disk beside a GPU, before the CPU computes what has been read.

    disk_rates: the share of a token's experts that are only there, by layer.
    """
    seconds = 0.0
    for size, disk_rate in zip(model.expert_bytes, disk_rates, strict=True):
        seconds += disk_rate * model.num_experts_per_tok * size / rates.disk_bytes_per_s
        seconds += (1.0 - (1.0 - disk_rate) ** model.num_experts_per_tok) * DISK_WAIT_S
    return seconds


def decode_seconds_on_cpu(
    model: ModelSizes, rates: Rates, hit_rates: Sequence[float], context: int = 0
) -> float:
    """`decode_seconds` if RAM is the fast memory and misses are read from the disk."""
    mixers = rates.mixer_rates
    seconds = model.cached_bytes(context) / mixers.cached_bytes_per_s
    seconds += model.attention_elements(context, 1) / mixers.row_pairs_per_s
    seconds += 2 * model.state_bytes / rates.ram_bytes_per_s
    seconds += _weights_seconds(model.dense_token_bytes, model.dense_products, rates)
    seconds += (model.num_layers * CPU_LAYER_OPS + 1) * mixers.op_s  # one of the head
    seconds += CPU_STEP_CALLS * mixers.call_s
    for layer, (size, hit_rate) in enumerate(zip(model.expert_bytes, hit_rates, strict=True)):
        chosen = model.num_experts_per_tok
        computed = chosen * _weights_seconds(size, model.products_of_expert(layer), rates)
        # Missed experts are read while the others are computed. They are computed after that.
        missed = 1.0 - hit_rate
        seconds += max(computed, missed * (chosen * size / rates.disk_bytes_per_s + computed))
        seconds += (1.0 - hit_rate**model.num_experts_per_tok) * DISK_WAIT_S
    return seconds


def _weights_seconds(num_bytes: int, products: Sequence[Products], rates: Rates) -> float:
    """Seconds in which all cores multiply weights in RAM, of so many bytes, by one row.

    Each type takes as long as its bytes or its instructions, whichever are slower. products: of these
    weights; what they leave of the bytes is only read.
    """
    if not products or not rates.product_values_per_s:
        return num_bytes / _cpu_bytes_per_s(rates)
    read = rates.row_share * rates.read_bytes_per_s
    rest = max(0, num_bytes - sum(each.num_bytes for each in products))
    return rest / read + _typed_seconds(products, 1.0, read, rates)


def _typed_seconds(products: Sequence[Products], rows: float, read: float, rates: Rates) -> float:
    """Seconds for weights of some types and so many rows: of each type, its bytes or its instructions."""
    return sum(
        max(each.num_bytes / read, rates.product_seconds(each.quant_type, each.num_values, rows))
        for each in products
    )


def _bytes_on_gpu(num_bytes: int, products: Sequence[Products], *, are_experts: bool) -> float:
    """Bytes of MEASURED_TYPE that a GPU multiplies by one row in the time that these weights take.

    products: of these weights; what they leave of the bytes counts as it is.
    """
    times = map(GPU_TIMES.__getitem__, (each.quant_type for each in products))
    over_measured = [time.experts_row if are_experts else time.row for time in times]
    measured = sum(time * each.num_values for time, each in zip(over_measured, products, strict=True))
    rest = max(0, num_bytes - sum(each.num_bytes for each in products))
    return rest + measured * MEASURED_TYPE.block_bytes / MEASURED_TYPE.block_elements


def _slower_launches(model: ModelSizes) -> float:
    """Launches of MEASURED_TYPE that take as long as a token's launches take longer because of their types.

    A type's ratio is of whole launches: also what is fixed of one grows with its instructions.
    """

    def excess(products: Sequence[Products], *, are_experts: bool) -> float:
        quantised = [each for each in products if each.quant_type.block_elements > 1]
        times = [GPU_TIMES[each.quant_type] for each in quantised]
        over_measured = [time.experts_row if are_experts else time.row for time in times]
        num_values = [each.num_values for each in quantised]
        return float(np.average(over_measured, weights=num_values)) - 1 if num_values else 0.0

    dense = model.num_layers * DENSE_LAUNCHES * excess(model.dense_products, are_experts=False)
    is_routed = not model.is_dense
    return dense + EXPERT_LAUNCHES * sum(
        count * excess(products, are_experts=is_routed)
        for products, count in Counter(map(model.products_of_expert, range(model.num_layers))).items()
    )


@lru_cache(maxsize=256)
def rates_of_experts(rates: Rates, num_bytes: int, products: tuple[Products, ...]) -> Rates:
    """`rates` in which bytes per second of the CPU and of the GPU's memory are those of experts with these
    weights.

    Experts of `MEASURED_TYPE` were measured where they lie. Of other types, the time of as many weights is
    in proportion to what bytes and instructions take by themselves.
    """
    if not products:
        return rates
    of_measured = _bytes_on_gpu(num_bytes, products, are_experts=True)
    in_vram = rates.vram_bytes_per_s * num_bytes / of_measured
    num_values = sum(each.num_values for each in products)
    measured_bus = 0.0 if "bus" in rates.shares.estimated else rates.shares.bus * rates.link_bytes_per_s
    over_bus = max(ROW_BUS_BYTES, measured_bus) * num_bytes / of_measured
    rates = ExpertRates(**vars(rates) | {"vram_bytes_per_s": in_vram, "row_bus_bytes_per_s": over_bus})
    if not rates.product_values_per_s:
        return rates
    read = rates.row_share * rates.read_bytes_per_s
    measured = Products(MEASURED_TYPE, num_values, MEASURED_TYPE.row_bytes(num_values))
    expert_rates = tuple(
        rate
        * num_bytes
        * _typed_seconds((measured,), rows, read, rates)
        / (measured.num_bytes * _typed_seconds(products, rows, read, rates))
        for rows, rate in zip(EXPERT_ROWS, rates.expert_bytes_per_s, strict=False)
    )
    by_instructions = sum(rates.product_seconds(each.quant_type, each.num_values, 1) for each in products)
    return replace(rates, expert_bytes_per_s=expert_rates, cpu_bytes_per_s=num_bytes / by_instructions)


def _kinds_of_layers(
    model: ModelSizes, hit_rates: Sequence[float], rates: Rates
) -> list[tuple[int, int, float, Rates]]:
    """Layers that are alike: how many, bytes of an expert, its hit rate, and `rates_of_experts`."""
    layers = zip(
        model.expert_bytes, hit_rates, map(model.products_of_expert, range(model.num_layers)), strict=True
    )
    return [
        (count, size, hit_rate, rates_of_experts(rates, size, products))
        for (size, hit_rate, products), count in Counter(layers).items()
    ]


def _cold_seconds(num_cpu: int, num_bus: int, expert_bytes: int, rates: Rates) -> float:
    """Seconds of CPU and bus together, each slower beside the other. The bus begins before the CPU."""
    cpu = num_cpu * expert_bytes / _misses_per_s(rates)
    bus = num_bus * expert_bytes / _row_bus_per_s(rates)
    if not num_cpu:
        return bus
    answer = rates.answer_s
    cpu_slowdown = _misses_per_s(rates) / _misses_per_s(rates, beside_link=True)
    bus_slowdown = _row_bus_per_s(rates) / _row_bus_per_s(rates, beside_cpu=True)
    bus = max(0.0, bus - answer)
    both = min(cpu * cpu_slowdown, bus * bus_slowdown)
    return answer + both + (cpu - both / cpu_slowdown) + (bus - both / bus_slowdown)


def _cpu_bytes_per_s(rates: Rates) -> float:
    """Bytes of weights that the CPU multiplies by one row in a second."""
    return min(rates.row_share * rates.read_bytes_per_s, rates.cpu_bytes_per_s)


def _misses_per_s(rates: Rates, *, beside_link: bool = False) -> float:
    """`_cpu_bytes_per_s` for the experts that a GPU requests."""
    shares = rates.shares
    alone = shares.misses * rates.read_bytes_per_s
    read = shares.misses_beside * rates.read_beside_link if beside_link else alone
    products = rates.expert_bytes_per_s[0] if rates.expert_bytes_per_s else rates.cpu_bytes_per_s
    return min(read, products)


def _row_bus_per_s(rates: Rates, *, beside_cpu: bool = False) -> float:
    """Bytes a second that kernels of one row read over the bus."""
    shares = rates.shares
    alone = shares.bus * rates.link_bytes_per_s
    return min(shares.bus_beside * rates.link_beside_read if beside_cpu else alone, rates.row_bus_bytes_per_s)


def _seconds_beside_copies(num_cpu: int, num_copied: int, expert_bytes: int, rates: Rates) -> float:
    """Seconds of the CPU for experts of a token, while others are copied to the GPU."""
    if not num_cpu:
        return 0.0
    copies = num_copied * expert_bytes / staged_per_s(rates)
    alone = _misses_per_s(rates)
    slowdown = max(1.0, alone / _misses_per_s(rates, beside_link=True))
    cpu = num_cpu * expert_bytes / alone
    both = min(copies, cpu * slowdown)
    return rates.answer_s + both + cpu - both / slowdown


def _resident_seconds(num_resident: int, expert_bytes: int, rates: Rates) -> float:
    """Seconds of a layer's experts in the GPU's memory."""
    read = num_resident * expert_bytes / (rates.shares.vram * rates.vram_bytes_per_s)
    return EXPERT_LAUNCHES * rates.shares.launch_s + read


def staged_per_s(rates: Rates) -> float:
    """Bytes a second of whole experts that come over the bus beside the CPU."""
    return min(rates.shares.staged, 1.0) * rates.link_bytes_per_s


def _experts_seconds(
    num_resident: int, num_misses: int, expert_bytes: int, rates: Rates, *, streams: bool = True
) -> float:
    on_gpu = _resident_seconds(num_resident, expert_bytes, rates)
    return max(on_gpu, split_misses(num_misses, expert_bytes, rates, streams=streams).seconds)


def _layers_seconds(model: ModelSizes, rates: Rates, hit_rates: Sequence[float]) -> float:
    """Seconds of a dense model's FFNs: first on the GPU, then on the CPU and the bus."""
    held = [
        _bytes_on_gpu(size, model.products_of_expert(layer), are_experts=False)
        for layer, (size, rate) in enumerate(zip(model.expert_bytes, hit_rates, strict=True))
        if rate
    ]
    seconds = model.num_layers * EXPERT_LAUNCHES * rates.shares.launch_s
    seconds += sum(held) / (rates.shares.vram * rates.vram_bytes_per_s)
    missing = [1] * (model.num_layers - len(held))
    if not missing:
        return seconds
    times = miss_times_of(model, rates, is_layer=True)
    num_bus = times.num_streamed(missing)
    return seconds + 1e-9 * times.nanoseconds(num_bus, missing[num_bus:])


def _binomial(number: int, odds: float) -> list[float]:
    """Probabilities that 0 to `number` experts miss, or are guessed, each by itself with the same odds."""
    return [comb(number, count) * odds**count * (1 - odds) ** (number - count) for count in range(number + 1)]
