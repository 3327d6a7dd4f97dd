"""How much of the fast memory a model may take, and what to advise where that is too little."""

from collections.abc import Callable

from coldstream.errors import OutOfMemoryError
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import BudgetTooSmallError
from coldstream.planning.config import DEFAULT_CACHE_SHARE, EngineConfig, cache_bytes_per_token

ALL_BYTES = 2**62  # a budget without effect

_AUTO_RAM_SHARE = 0.9  # of what is available: the rest is for everything else that runs
_WORTHWHILE_CTX_SIZE = 512  # tokens, of which a default context is that an advised budget allows
_UNIT = 2**20


def budget_bytes(config: EngineConfig, hardware: Hardware) -> int:
    """Bytes of the fast memory: what the configuration allows, or else what is free."""
    if config.device == "cuda":
        if isinstance(config.vram, int):
            return config.vram
        assert hardware.gpu is not None, "a configuration for a GPU needs one, or a budget"
        return hardware.gpu.free_bytes
    return ram_bytes(config, hardware)


def ram_bytes(config: EngineConfig, hardware: Hardware) -> int:
    """Bytes of RAM: what the configuration allows, or else most of what is available."""
    return config.ram if isinstance(config.ram, int) else int(hardware.ram_available_bytes * _AUTO_RAM_SHARE)


def advised(
    error: BudgetTooSmallError,
    config: EngineConfig,
    spec: ModelSpec,
    attempt: Callable[[int], object],
    prompt_cache_bytes: int = 0,
) -> OutOfMemoryError:
    """`error` with advice. `attempt` plans with another budget of its memory, and raises like `error` if that
    is too small.

    If `config` has a budget, the advice is one in whole MiB with which `attempt` succeeds; or so large a
    prompt cache, of the `prompt_cache_bytes` that a budget of RAM contains, as leaves what that adds.
    """
    has_caches = (error.tier == "vram") == (config.device == "cuda")
    kept = prompt_cache_bytes if error.tier == "ram" else 0
    if not isinstance(getattr(config, error.tier), int):
        other = (
            ", or --device cpu" if error.tier == "vram" else "; more of it is free when other programs end"
        )
        smaller = f"{'smaller --ctx-size' if has_caches else 'larger --vram'} or a smaller quantisation"
        if kept and error.least_bytes - kept <= error.budget_bytes:
            smaller = "smaller --prompt-cache"
        return OutOfMemoryError(f"{error}. Choose a {smaller}{other}")
    least = error.least_bytes
    if has_caches and not config.ctx_size:
        ctx_size = min(_WORTHWHILE_CTX_SIZE, spec.context_length)
        least += int(ctx_size * cache_bytes_per_token(config, spec) / DEFAULT_CACHE_SHARE)
    budget = -(-least // _UNIT)
    while (problem := _problem(attempt, budget * _UNIT)) is not None:
        budget = max(budget + 1, -(-problem.least_bytes // _UNIT))
    others = [f"try --{error.tier} {budget}M"]
    smaller_cache = (kept + error.budget_bytes) // _UNIT - budget
    if smaller_cache > 0:
        others.append(f"--prompt-cache {smaller_cache}M")
    if has_caches and config.ctx_size:
        others.append("a smaller --ctx-size")
    return OutOfMemoryError(f"{error}; {', or '.join(others)}")


def _problem(attempt: Callable[[int], object], budget: int) -> BudgetTooSmallError | None:
    try:
        attempt(budget)
    except BudgetTooSmallError as error:
        return error
    return None
