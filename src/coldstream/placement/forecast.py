"""Forecasts of a plan: expected speed, its upper bounds, and the gain of one more GiB. Pure.

The bounds follow from bytes and measured rates, whatever the kernels. A forecast divided by its bound is the
share of the machine that is used, at most 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from coldstream.placement.cost import (
    decode_seconds,
    decode_seconds_on_cpu,
    disk_seconds,
    prefetch_gain,
)
from coldstream.placement.hit_rates import HitCurve, expected_hit_rates
from coldstream.placement.kernel_shares import OF_GPU, OF_MISSES
from coldstream.placement.plan import PlacementPlan, Tier
from coldstream.placement.pool_plan import PoolPlan
from coldstream.placement.prompt_cost import (
    prefill_seconds,
    prefill_seconds_on_cpu,
    prompt_steps,
)
from coldstream.placement.rates import Rates
from coldstream.placement.sizes import ModelSizes

Array = np.ndarray[Any, Any]

PROMPT_LENGTHS: Final = (168, 512, 2048, 8192)
NEXT_BYTES: Final = 2**30  # further fast memory of the forecast to compare with


@dataclass(frozen=True)
class Forecast:
    """Expected figures of a plan. Tokens per second of one sequence."""

    hit_rate: float  # share of a token's routed experts that are in fast memory
    disk_rate: float  # share of them that are only on the disk
    cold_token_bytes: int  # bytes of a token's experts that are elsewhere
    decode: float  # at the given context, with prefetching if it saves time and is allowed
    decode_ceiling: float  # what bytes and rates allow at most
    prefetch_gain_s: float  # of a token, see `prefetch_gain`; 0 without a GPU
    prefill: dict[int, float]  # by the prompt's length; none beyond the context
    prefill_ceiling: dict[int, float]


@dataclass(frozen=True)
class Known:
    """The inputs of a forecast beside the plan.

    locked_share: of the layers that lack experts, those whose experts a GPU may read over the bus.
    """

    model: ModelSizes
    rates: Rates
    curve: HitCurve
    uses: Array | None = None  # float [layers, experts]; None: nothing is known
    may_prefetch: bool = True
    locked_share: float = 1.0


def forecast(plan: PlacementPlan, known: Known, context: int = 0, pool: PoolPlan | None = None) -> Forecast:
    """The forecast of `plan`, a plan of `known.model`, with decoding after `context` tokens.

    pool: the experts in RAM beside a GPU; None: all that it lacks are mapped.
    """
    model = known.model
    rates = hit_rates_of(plan, known)
    chosen = [model.num_experts_per_tok * size for size in model.expert_bytes]
    cold = sum((1 - rate) * num_bytes for rate, num_bytes in zip(rates, chosen, strict=True))
    resident = np.zeros((model.num_layers, model.num_experts), bool)
    resident.ravel()[plan.resident_numbers()] = True
    on_gpu = plan.tier == "vram"
    on_disk, disk_rates = None, [0.0 if on_gpu else 1 - rate for rate in rates]
    if pool is not None:
        on_disk, disk_rates = ~resident & ~_in_pool(pool, model), _disk_rates(plan, pool, known)
    if on_gpu:
        decode, gain = decode_forecast(known, rates, context)
        decode += disk_seconds(model, known.rates, disk_rates)
    else:
        decode, gain = decode_seconds_on_cpu(model, known.rates, rates, context), 0.0
    with_gpu = partial(prefill_seconds, on_disk=on_disk, ring_bytes=plan.ring_bytes)
    prefill = with_gpu if on_gpu else prefill_seconds_on_cpu
    read = sum(rate * num_bytes for rate, num_bytes in zip(disk_rates, chosen, strict=True))
    lengths = [length for length in PROMPT_LENGTHS if length <= plan.fixed.ctx_size]
    chunk_size = plan.fixed.chunk_size
    given = (model, known.rates, resident, known.uses)
    return Forecast(
        hit_rate=1 - cold / max(1, sum(chosen)),
        disk_rate=read / max(1, sum(chosen)),
        cold_token_bytes=round(cold),
        decode=1 / decode,
        decode_ceiling=decode_ceiling(model, known.rates, rates, plan.tier, disk_rates),
        prefetch_gain_s=gain,
        prefill={length: length / prefill(*given, length, chunk_size) for length in lengths},
        prefill_ceiling={
            length: prefill_ceiling(*given, length, chunk_size, plan.tier, on_disk) for length in lengths
        },
    )


def hit_rates_of(plan: PlacementPlan, known: Known) -> tuple[float, ...]:
    """Expected hit rates by layer."""
    return expected_hit_rates(known.curve, [len(ids) for ids in plan.resident], known.model.num_experts)


def _in_pool(pool: PoolPlan, model: ModelSizes) -> Array:
    """bool [layers, experts]: those that begin in the pool."""
    found = np.zeros((model.num_layers, model.num_experts), bool)
    for layer, ids in enumerate(pool.loaded):
        found[layer, list(ids)] = True
    return found


def _disk_rates(plan: PlacementPlan, pool: PoolPlan, known: Known) -> list[float]:
    """By layer, the share of uses that find their expert in neither memory."""
    num_experts = known.model.num_experts
    both = [{*on_gpu, *in_ram} for on_gpu, in_ram in zip(plan.resident, pool.loaded, strict=True)]
    counts = [len(ids) for ids, size in zip(both, pool.expert_bytes, strict=True) if size]
    rate = 1.0 - known.curve.at(sum(counts) / (len(counts) * num_experts))
    return [rate if size else 0.0 for size in pool.expert_bytes]


def decode_forecast(known: Known, hit_rates: Sequence[float], context: int = 0) -> tuple[float, float]:
    """(seconds per token, `prefetch_gain`) of `known.model` with a GPU. hit_rates: of each layer."""
    share = known.locked_share
    seconds = share * decode_seconds(known.model, known.rates, hit_rates, context)
    if share < 1:
        seconds += (1 - share) * decode_seconds(known.model, known.rates, hit_rates, context, streams=False)
    gain = share * prefetch_gain(known.model, known.rates, hit_rates)
    return seconds - (max(0.0, gain) if known.may_prefetch else 0.0), gain


def rates_used(plan: PlacementPlan, pool: PoolPlan | None = None) -> tuple[str, ...]:
    """Names of the rates on which its forecast depends."""
    if pool is not None:
        return (*rates_used(plan), "disk_bytes_per_s")
    if plan.tier == "ram":
        in_ram = ("read_bytes_per_s", "row_bytes_per_s", "mixers")
        return in_ram if plan.is_all_resident else (*in_ram, "disk_bytes_per_s")
    on_gpu = ("vram_bytes_per_s", "product_ops_per_s")
    cold = ("read_bytes_per_s", "link_bytes_per_s", "handshake_s")
    return on_gpu if plan.is_all_resident else on_gpu + cold


def shares_used(plan: PlacementPlan) -> tuple[str, ...]:
    """Names of the kernels' shares on which its forecast depends."""
    if plan.tier == "ram":
        return ()
    if plan.is_all_resident:
        return OF_GPU
    return OF_GPU + OF_MISSES


def decode_ceiling(
    model: ModelSizes,
    rates: Rates,
    hit_rates: Sequence[float],
    tier: Tier,
    disk_rates: Sequence[float] | None = None,
) -> float:
    """Tokens per second if all memories are read at the same time. hit_rates: of each layer.

    disk_rates: shares of experts that are only on the disk, beside a GPU; None: none are.
    """
    chosen = [model.num_experts_per_tok * size for size in model.expert_bytes]
    cold = sum((1.0 - rate) * num_bytes for rate, num_bytes in zip(hit_rates, chosen, strict=True))
    fast = model.dense_token_bytes + sum(chosen) - cold
    if tier == "vram":
        shares = disk_rates or [0.0] * model.num_layers
        read = sum(share * num_bytes for share, num_bytes in zip(shares, chosen, strict=True))
        return 1 / max(
            fast / rates.vram_bytes_per_s,
            cold / _cold_bytes_per_s(rates),
            read / rates.disk_bytes_per_s,
        )
    return 1 / max((fast + cold) / rates.ram_bytes_per_s, cold / rates.disk_bytes_per_s)


def prefill_ceiling(
    model: ModelSizes,
    rates: Rates,
    resident: Array,
    uses: Array | None,
    num_tokens: int,
    chunk_size: int,
    tier: Tier,
    on_disk: Array | None = None,
) -> float:
    """Tokens per second if each step copies its cold experts once, while others are multiplied.

    resident: bool [layers, experts]; uses as in `plan_placement`. on_disk: as `resident`, the experts that
    are only there, beside a GPU; None: none are.
    """
    cold_rate = _cold_bytes_per_s(rates) if tier == "vram" else rates.disk_bytes_per_s
    of_cpu = rates.most_cpu_ops_per_s
    ops_rate = rates.product_ops_per_s + of_cpu if tier == "vram" else of_cpu
    sizes = np.asarray(model.expert_bytes, np.float64)[:, None]
    seconds = 0.0
    for step in prompt_steps(model, uses, num_tokens, chunk_size):
        touched = step.touched * sizes
        head_values = model.head.num_values if model.head else 0  # which only the last row meets
        ops = 2 * (step.count * model.token_parameters - (step.count - 1) * head_values)
        read = 0.0 if on_disk is None else float(touched[on_disk].sum())
        seconds += max(
            float(touched[~resident].sum()) / cold_rate, ops / ops_rate, read / rates.disk_bytes_per_s
        )
    return num_tokens / seconds


def _cold_bytes_per_s(rates: Rates) -> float:
    """Bytes per second of experts in RAM, by the CPU and over the bus together."""
    both = rates.read_beside_link + rates.link_beside_read
    return max(rates.read_bytes_per_s, rates.link_bytes_per_s, both)
