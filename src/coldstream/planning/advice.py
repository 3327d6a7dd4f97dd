"""What to say of a budget that is too small: what the least is made of, and settings that suffice. Pure.

Advice is a choice with another budget: what is advised has been tried.
"""

from dataclasses import replace
from typing import Final

from coldstream.errors import OutOfMemoryError
from coldstream.kvcache.cache import least_kv_bytes
from coldstream.placement.plan import BudgetTooSmallError, PlacementPlan, PlanOptions
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.choose import DEFAULT_CACHE_SHARE, TooSmall, choose, place
from coldstream.planning.config import EngineConfig
from coldstream.planning.facts import Facts
from coldstream.planning.unknowns import Missing

_WORTHWHILE_CTX_SIZE: Final = 512  # tokens of the least default context that an advised budget must allow
_UNIT: Final = 2**20


def advised(
    small: TooSmall, config: EngineConfig, facts: Facts, options: PlanOptions, prompt_cache_bytes: int
) -> OutOfMemoryError | Missing:
    """The error for `small`, which is what `config` has come to, with advice.

    If `config` has a budget, the advice is one in whole MiB with which there is a plan; or so large a prompt
    cache, of the `prompt_cache_bytes` that a budget of RAM contains, as leaves what that adds.
    """
    error = BudgetTooSmallError(small.tier, small.budget_bytes, small.made_of)
    kept = prompt_cache_bytes if small.tier == "ram" else 0
    if not isinstance(getattr(config, small.tier), int):
        return OutOfMemoryError(f"{error}. {_without_a_budget(small, config, kept)}")
    budget = -(-_first_to_try(small, config, facts) // _UNIT)
    while True:
        answer = _tried(small, config, budget * _UNIT, facts, options, prompt_cache_bytes)
        if isinstance(answer, Missing):
            return answer
        if not isinstance(answer, TooSmall):
            break
        budget = max(budget + 1, -(-answer.least_bytes // _UNIT))
    others = [f"try --{small.tier} {budget}M"]
    smaller_cache = (kept + small.budget_bytes) // _UNIT - budget
    if smaller_cache > 0:
        others.append(f"--prompt-cache {smaller_cache}M")
    if _has_caches(small, config) and config.ctx_size:
        others.append("a smaller --ctx-size")
    return OutOfMemoryError(f"{error}; {', or '.join(others)}")


def _without_a_budget(small: TooSmall, config: EngineConfig, kept: int) -> str:
    """What to change where the memory is what is free."""
    other = ", or --device cpu" if small.tier == "vram" else "; more of it is free when other programs end"
    size = "smaller --ctx-size" if _has_caches(small, config) else "larger --vram"
    smaller = f"{size} or a smaller quantisation"
    if kept and small.least_bytes - kept <= small.budget_bytes:
        smaller = "smaller --prompt-cache"
    return f"Choose a {smaller}{other}"


def _first_to_try(small: TooSmall, config: EngineConfig, facts: Facts) -> int:
    """The least budget, and room for a default context that is worth having."""
    if not _has_caches(small, config) or config.ctx_size:
        return small.least_bytes
    spec = facts.model.spec.with_window(config.attention_window)
    ctx_size = min(_WORTHWHILE_CTX_SIZE, spec.context_length)
    kv_bytes = least_kv_bytes(spec, ctx_size, config.cache_type_k)
    return small.least_bytes + int(kv_bytes / DEFAULT_CACHE_SHARE)


def _tried(
    small: TooSmall,
    config: EngineConfig,
    budget: int,
    facts: Facts,
    options: PlanOptions,
    prompt_cache_bytes: int,
) -> RunPlan | PlacementPlan | TooSmall | Missing:
    """What comes of another budget of the memory that is too small."""
    if _has_caches(small, config):
        spec_type = "none" if config.spec_type == "auto" else config.spec_type  # it would take no less
        config = replace(config.with_budget(small.tier, budget), spec_type=spec_type)
        return place(config, facts, options, prompt_cache_bytes)
    # Beside a GPU. Experts that are fetched ahead may have no place in the least budget.
    return choose(replace(config, ram=budget, prefetch="auto"), facts, options, prompt_cache_bytes)


def _has_caches(small: TooSmall, config: EngineConfig) -> bool:
    """Whether the memory that is too small is the one that holds the caches."""
    return (small.tier == "vram") == (config.device == "cuda")
