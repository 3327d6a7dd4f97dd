"""The present forecast of `coldstream plan` for the full-size model, on the machine of a result file."""

from typing import Any

from coldstream.gguf.quant_types import QuantType
from coldstream.placement.forecast import Known, decode_forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.hit_rates import PUBLISHED
from coldstream.placement.rates import Rates
from coldstream.placement.sizes import ModelSizes, Products

SHORT_PROMPT = 64  # tokens of a prompt at depth 0

# The file of full_size_model.py as placement sees it, with keys and values in float16.
FULL_SIZES = ModelSizes(
    fingerprint="00" * 16,  # any file of these sizes
    num_experts=256,
    num_experts_per_tok=8,
    expert_bytes=(2039808,) * 5 + (1769472, 1769472, 2039808) * 9 + (1769472,) * 2 + (2039808,) * 6,
    dense_bytes=1654614528,
    dense_token_bytes=1368551040,
    kv_token_bytes=20480,
    state_bytes=65863680,
    token_parameters=2946431616,
    expert_parameters=3145728,
    attention_width=40960,
    head=Products(QuantType.Q6_K, 508559360, 417177600),
)


def hardware_of(result: dict[str, Any]) -> Hardware:
    """The measured machine that a result of gpu_hybrid.py names."""
    facts = result["hardware"]
    gpu = GpuHardware(**{name: _hashable(value) for name, value in facts["gpu"].items()})
    return Hardware(**{name: _hashable(value) for name, value in facts.items()} | {"gpu": gpu})


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def mean_context(depth: int, warm_tokens: int, timed_tokens: int) -> int:
    """Tokens before a timed one, on average."""
    return max(SHORT_PROMPT, depth) + warm_tokens + timed_tokens // 2


def expected_tok_s(result: dict[str, Any], row: dict[str, Any]) -> float:
    """Decoding in a row of it, where hit rates are the published ones."""
    share = row["experts_share"]
    hit_rate = PUBLISHED.at(share) if share < 1.0 else 1.0
    known = Known(FULL_SIZES, Rates.of(hardware_of(result)), PUBLISHED, may_prefetch=row["prefetch"] != 0)
    context = mean_context(row["depth"], result["warm_tokens"], result["timed_tokens"])
    seconds, _ = decode_forecast(known, (hit_rate,) * FULL_SIZES.num_layers, context)
    return 1 / seconds
