"""The present forecast of `coldstream plan` for the full-size model, on the machine of a result file."""

from dataclasses import replace
from typing import Any

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement.forecast import Known, decode_forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.hit_rates import PUBLISHED
from coldstream.placement.rates import Rates
from coldstream.placement.sizes import ModelSizes, Products

ASSUMED_CALL_S = 2e-5  # of mixers that were measured without it
SHORT_PROMPT = 64  # tokens of a prompt at depth 0


def _products(**num_values: int) -> tuple[Products, ...]:
    """Of so many weights, by the name of a type."""
    types = {QuantType[name]: count for name, count in num_values.items()}
    return tuple(Products(kind, count, kind.row_bytes(count)) for kind, count in types.items())


_PLAIN, _OUTER = _products(Q4_K=3145728), _products(Q4_K=2097152, Q6_K=1048576)
_EXPERTS = (_OUTER,) * 5 + (_PLAIN, _PLAIN, _OUTER) * 9 + (_PLAIN,) * 2 + (_OUTER,) * 6

# The file of full_size_model.py as placement sees it, with keys and values in float16.
FULL_SIZES = ModelSizes(
    fingerprint="00" * 16,  # any file of these sizes
    num_experts=256,
    num_experts_per_tok=8,
    expert_bytes=tuple(sum(part.num_bytes for part in expert) for expert in _EXPERTS),
    dense_bytes=1654614528,
    dense_token_bytes=1368551040,
    kv_token_bytes=20480,
    state_bytes=65863680,
    token_parameters=2946431616,
    expert_parameters=3145728,
    attention_width=40960,
    head=_products(Q6_K=508559360)[0],
    table_bytes=286064640,
    placed_layers=tuple(range(40)),
    hidden_size=2048,
)
# The same with its types, which a plan knows.
TYPED_SIZES = replace(
    FULL_SIZES,
    dense_products=_products(F32=21954560, Q4_K=878444544, Q5_K=503316480, Q6_K=535822336),
    expert_products=_EXPERTS,
)


def hardware_of(result: dict[str, Any]) -> Hardware:
    """The measured machine that a result of gpu_hybrid.py names."""
    facts = result["hardware"]
    steps = steps_of(facts["gpu"].get("steps"), facts["num_physical_cores"])
    gpu = GpuHardware(**_rates_in(facts["gpu"]) | {"steps": steps})
    return Hardware(**_rates_in(facts) | {"gpu": gpu, "mixers": mixers_of(facts.get("mixers"))})


def _rates_in(facts: dict[str, Any]) -> dict[str, Any]:
    """Without what may have disturbed their measurement."""
    return {name: _hashable(value) for name, value in facts.items() if name != "conditions"}


def mixers_of(facts: dict[str, Any] | None) -> MixerRates | None:
    """Rates between products in a result; those of before Python was measured have an estimate of it."""
    return MixerRates.parsed({"call_s": ASSUMED_CALL_S} | facts) if facts else None


def steps_of(facts: dict[str, Any] | None, cores: int) -> StepRates | None:
    """Rates of steps in a result. Before requests were measured, an expert took what many in a row took on
    all cores, of which a run leaves one to the thread that waits for the GPU.
    """
    if facts is None or "request_s" in facts:
        return StepRates.parsed(facts)
    fewer = {name: facts[name] * max(1, cores - 1) / cores for name in ("misses_alone", "misses_beside")}
    return StepRates.parsed(facts | fewer | {"request_s": 0.0})


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def mean_context(depth: int, warm_tokens: int, timed_tokens: int) -> int:
    """Tokens before a timed one, on average."""
    return max(SHORT_PROMPT, depth) + warm_tokens + timed_tokens // 2


def expected_tok_s(result: dict[str, Any], row: dict[str, Any]) -> float:
    """Decoding in a row of it, where hit rates are the published ones."""
    share = row["experts_share"]
    hit_rate = PUBLISHED.at(share) if share < 1.0 else 1.0
    known = Known(TYPED_SIZES, Rates.of(hardware_of(result)), PUBLISHED, may_prefetch=row["prefetch"] != 0)
    context = mean_context(row["depth"], result["warm_tokens"], result["timed_tokens"])
    seconds, _ = decode_forecast(known, (hit_rate,) * TYPED_SIZES.num_layers, context)
    return 1 / seconds
