"""Upper bounds of speed from bytes and measured rates, for any kernels. Pure.

A forecast divided by its bound is the share of the machine that is used, at most 1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coldstream.placement.cost import expected_rows, expected_touched
from coldstream.placement.plan import Tier
from coldstream.placement.rates import Rates
from coldstream.placement.sizes import ModelSizes

Array = np.ndarray[Any, Any]


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
    return 1 / max((fast + cold) / rates.read_bytes_per_s, cold / rates.disk_bytes_per_s)


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
    ops_rate = rates.product_ops_per_s + rates.cpu_ops_per_s if tier == "vram" else rates.cpu_ops_per_s
    sizes = np.asarray(model.expert_bytes, np.float64)[:, None]
    seconds = 0.0
    for start in range(0, num_tokens, chunk_size):
        count = min(chunk_size, num_tokens - start)
        touched = expected_touched(expected_rows(model, uses, count), count) * sizes
        ops = 2 * count * model.token_parameters
        read = 0.0 if on_disk is None else float(touched[on_disk].sum())
        seconds += max(
            float(touched[~resident].sum()) / cold_rate, ops / ops_rate, read / rates.disk_bytes_per_s
        )
    return num_tokens / seconds


def _cold_bytes_per_s(rates: Rates) -> float:
    """Bytes per second of experts in RAM, by the CPU and over the bus together."""
    both = rates.read_beside_link + rates.link_beside_read
    return max(rates.read_bytes_per_s, rates.link_bytes_per_s, both)
