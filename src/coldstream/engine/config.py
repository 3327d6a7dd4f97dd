"""The engine's settings: plain data, checked on creation, and `auto` resolved once by a pure function.

Field names are the keyword arguments of `LLM` and, with dashes, the command line's flags.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from coldstream.errors import ConfigError, OutOfMemoryError
from coldstream.models.spec import ModelSpec
from coldstream.placement.hardware import Hardware

DEVICES = ("cpu",)
TIERS = ("auto", "generic", "avx2", "avx512", "amx")
CACHE_DTYPES = {"f16": "float16", "f32": "float32"}
_CACHE_BYTES = {"f16": 2, "f32": 4}  # per element
MAX_THREADS = 1024
DEFAULT_CTX_SIZE = 32768  # what `ctx_size` resolves to if the model and the memory allow it
_DEFAULT_CACHE_SHARE = 0.25  # of available RAM, for the cache of a default context

CacheType = Literal["f16", "f32"]


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. Creation checks each value by itself, `resolve` against model and machine."""

    model: str  # path, or org/repo[:QUANT]
    ctx_size: int | None = None  # tokens, prompt and answer together; None or 0: chosen by `resolve`
    threads: int | Literal["auto"] = "auto"  # auto: one per physical core
    device: str = "cpu"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    tier: str = "auto"  # of CPU kernels; auto: the fastest that this CPU has
    seed: int | None = None  # for requests that name none; None: a fresh one for each
    offline: bool = False  # never ask the hub; only local files and its cache

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a path or org/repo[:QUANT], not {self.model!r}")
        if self.ctx_size is not None:
            _check_integer("ctx_size", self.ctx_size, 0, 2**31 - 1)
        if self.threads != "auto":
            _check_integer("threads", self.threads, 1, MAX_THREADS)
        if self.device == "cuda":
            raise ConfigError("device cuda: this version computes on the CPU only; use device cpu")
        _check_choice("device", self.device, DEVICES)
        _check_choice("tier", self.tier, TIERS)
        _check_choice("cache_type_k", self.cache_type_k, CACHE_DTYPES)
        _check_choice("cache_type_v", self.cache_type_v, CACHE_DTYPES)
        if self.cache_type_k != self.cache_type_v:
            raise ConfigError(
                f"cache_type_k {self.cache_type_k} and cache_type_v {self.cache_type_v} must be the same"
            )
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.offline, bool):
            raise ConfigError(f"offline must be True or False, not {self.offline!r}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """The configuration with these fields. Raises ConfigError, with advice, for a key that is none."""
        names = [field.name for field in fields(cls)]
        for key in options:
            if key not in names:
                close = difflib.get_close_matches(key, names, n=1)
                advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
                raise ConfigError(f"unknown setting {key}: {advice}")
        return cls(**options)


def resolve(config: EngineConfig, spec: ModelSpec, hardware: Hardware, weight_bytes: int = 0) -> EngineConfig:
    """`config` with `ctx_size` and `threads` made concrete for this model and machine. Pure.

    weight_bytes is what the weights take that are kept in memory whole. The tier stays as it is: only the
    compiled kernels know what they hold, and the opened model reports its choice. Raises ConfigError for a
    context beyond the model's, OutOfMemoryError if weights and cache exceed the free RAM.
    """
    if weight_bytes > hardware.ram_available_bytes:
        raise OutOfMemoryError(
            f"the weights that every token reads need {weight_bytes / 2**30:.1f} GiB, "
            f"{hardware.ram_available_bytes / 2**30:.1f} GiB are free: choose a smaller quantisation"
        )
    hardware = replace(hardware, ram_available_bytes=hardware.ram_available_bytes - weight_bytes)
    threads = hardware.num_physical_cores if config.threads == "auto" else config.threads
    token_bytes = cache_bytes_per_token(config, spec)
    if config.ctx_size:
        _check_context(config.ctx_size, token_bytes, spec, hardware)
        return replace(config, threads=threads)
    affordable = int(hardware.ram_available_bytes * _DEFAULT_CACHE_SHARE) // max(1, token_bytes)
    ctx_size = max(1, min(spec.context_length, DEFAULT_CTX_SIZE, affordable))
    return replace(config, threads=threads, ctx_size=ctx_size)


def cache_bytes_per_token(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that one more token of context takes in the key and value caches of all attention layers."""
    num_attention_layers = sum(kind == "attention" for kind in spec.layer_kinds)
    element_bytes = _CACHE_BYTES[config.cache_type_k] + _CACHE_BYTES[config.cache_type_v]
    return num_attention_layers * spec.num_kv_heads * spec.head_dim * element_bytes


def _check_context(ctx_size: int, token_bytes: int, spec: ModelSpec, hardware: Hardware) -> None:
    if ctx_size > spec.context_length:
        raise ConfigError(
            f"ctx_size {ctx_size} is beyond the {spec.context_length} tokens that the model was trained for"
        )
    need, free = ctx_size * token_bytes, hardware.ram_available_bytes
    if need > free:
        raise OutOfMemoryError(
            f"a context of {ctx_size} tokens needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: "
            f"try --ctx-size {max(1, free // 2 // token_bytes)}"
        )


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
