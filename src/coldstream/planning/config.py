"""The engine's settings: plain data, checked on creation. `choose.py` makes `auto` concrete, once.

Field names are the keyword arguments of `LLM` and, with dashes, the command line's flags.
"""

import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from coldstream.decoding.speculation import MAX_TREE_NODES
from coldstream.errors import ConfigError, shown
from coldstream.experts.prefetch import MAX_PREFETCHED
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.placement import run_plan
from coldstream.placement.plan import Tier

DEVICES = ("auto", "cpu", "cuda")
SPEC_TYPES = ("auto", *run_plan.SPEC_TYPES)
TIERS = ("auto", "generic", "avx2", "avx_vnni", "avx512", "amx", "neon", "dotprod")
MAX_THREADS = 1024
MAX_BYTES = 2**60
MAX_PARALLEL = 64  # whole contexts

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([kmgt]?)(?:i?b)?", re.ASCII)

CacheType = Literal["auto", "i16", "i8", "i4", "i3"]
DEFAULT_CACHE_TYPE: CacheType = "i16"
# For the names that llama.cpp and vLLM have for such types.
NEAREST_CACHE_TYPES = {
    **dict.fromkeys(("f32", "f16", "bf16", "float16", "bfloat16"), "i16"),
    **dict.fromkeys(("q8_0", "q5_0", "q5_1", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"), "i8"),
    **dict.fromkeys(("q4_0", "q4_1", "iq4_nl", "tq4_0"), "i4"),
    "tq3_0": "i3",
}
ONE_GPU = (
    "one GPU computes, the first that the driver shows, with the CPU beside it; leave it out, and choose "
    "another by CUDA_VISIBLE_DEVICES"
)
# Whose memory a budget is of.
_OWNERS: Final = {"vram": "the one GPU that computes", "ram": "the machine"}
# What to say to settings of vLLM and of llama-cpp-python.
_OTHER_SETTINGS = {
    **dict.fromkeys(("max_model_len", "max_seq_len", "n_ctx"), "use ctx_size"),
    **dict.fromkeys(
        ("gpu_memory_utilization", "n_gpu_layers", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
        'use vram, a size such as "6G" of the GPU\'s memory, or leave it out for all that is free',
    ),
    **dict.fromkeys(("cpu_offload_gb", "swap_space"), 'use ram, a size such as "16G", or leave it out'),
    **dict.fromkeys(("kv_cache_dtype", "type_k", "type_v"), "use cache_type_k and cache_type_v"),
    "max_num_seqs": "use parallel",
    "n_threads": "use threads",
    **dict.fromkeys(("speculative_config", "draft_model"), "use spec_type and model_draft"),
    **dict.fromkeys(
        ("model_path", "repo_id", "hf_overrides", "revision"), "the model is a path or org/repo[:QUANT]"
    ),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "dtype", "quantization", "load_format"),
        "the model's file says it; leave it out",
    ),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        ONE_GPU,
    ),
    **dict.fromkeys(("devices", "tensor_split", "main_gpu", "split_mode"), ONE_GPU),
    **dict.fromkeys(
        ("trust_remote_code", "enforce_eager", "enable_prefix_caching", "disable_log_stats"),
        "there is nothing to choose here; leave it out",
    ),
}


# Settings that a plan contains.
_PLANNED = (
    *("vram", "ram", "ctx_size", "cache_type_k", "cache_type_v", "attention_window"),
    *("spec_type", "tree_budget", "parallel"),
)


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. Creation checks each value by itself, `choose` against model and machine."""

    model: str  # path, or org/repo[:QUANT]
    ctx_size: int | None = None  # tokens, prompt and answer together; None or 0: chosen by `choose`
    vram: int | str = "auto"  # bytes, also as "6G"; kept as an int. auto: what is free
    ram: int | str = "auto"  # the same of RAM, also beside a GPU; auto: most of what is available
    plan: str | None = None  # a file of `coldstream plan`, instead of budgets, context, caches and window
    threads: int | Literal["auto"] = "auto"  # auto: one per physical core
    device: str = "auto"  # auto: cuda if there is a GPU that this version can use
    # Types of cached keys and values. auto becomes the other one's type here, or else DEFAULT_CACHE_TYPE.
    cache_type_k: CacheType = "auto"
    cache_type_v: CacheType = "auto"
    # Positions that a token attends to at most, its own included; None: all. It changes the model's output.
    attention_window: int | None = None
    tier: str = "auto"  # of CPU kernels; auto: the fastest that this CPU has
    # Experts of a layer that a GPU fetches before its router has run, at most; auto: where that should pay.
    prefetch: int | Literal["auto"] = "auto"
    # What drafts tokens for the model to verify, which changes none; auto: a drafter that is named,
    # the model's own block where all of the model is held and it may pay, or none.
    spec_type: str = "auto"
    # A drafter's file or folder: a DFlash drafter, or a sidecar with the model's block for multi-token
    # prediction. spec_type auto is then dflash or mtp.
    model_draft: str | None = None
    tree_budget: int | Literal["auto"] = "auto"  # nodes of a draft tree; auto: as many as pay in each step
    # Whole contexts that there is memory for together; auto: as many as a share of the memory holds.
    parallel: int | Literal["auto"] = 1
    seed: int | None = None  # for requests that name none; None: a fresh one for each
    chat_template: str | None = None  # a file with a template to be used instead of the model's own
    offline: bool = False  # never ask the hub; only local files and its cache

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a path or org/repo[:QUANT], not {shown(self.model)}")
        if self.ctx_size is not None:
            _check_integer("ctx_size", self.ctx_size, 0, 2**31 - 1)
        if self.attention_window is not None:
            _check_integer("attention_window", self.attention_window, 1, 2**31 - 1)
        for name in ("vram", "ram"):
            object.__setattr__(self, name, _budget(name, getattr(self, name)))
        self._take_cache_types()
        if self.plan is not None:
            self._check_plan()
        if self.threads != "auto":
            _check_integer("threads", self.threads, 1, MAX_THREADS)
        _check_choice("device", self.device, DEVICES)
        _check_choice("tier", self.tier, TIERS)
        if self.device == "cuda" and self.tier != "auto":
            raise ConfigError(f"tier {self.tier} is one of CPU kernels: leave it out, or use device cpu")
        if self.device == "cpu" and self.vram != "auto":
            raise ConfigError("vram is the memory of a GPU, and the device is the CPU: leave --vram out")
        if self.prefetch != "auto":
            _check_integer("prefetch", self.prefetch, 0, MAX_PREFETCHED)
        if self.device == "cpu" and self.prefetch not in ("auto", 0):
            raise ConfigError("prefetch is over the bus of a GPU, and the device is the CPU: leave it out")
        _check_choice("spec_type", self.spec_type, SPEC_TYPES)
        if self.model_draft is not None:
            self._check_model_draft()
        if self.tree_budget != "auto":
            _check_integer("tree_budget", self.tree_budget, 1, MAX_TREE_NODES)
        if self.parallel != "auto":
            _check_integer("parallel", self.parallel, 1, MAX_PARALLEL)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.chat_template is not None and (
            not isinstance(self.chat_template, str) or not self.chat_template
        ):
            raise ConfigError(
                "chat_template (--chat-template) must be the path of a file with a Jinja template, not "
                f"{shown(self.chat_template)}"
            )
        if not isinstance(self.offline, bool):
            raise ConfigError(f"offline must be True or False, not {shown(self.offline)}")

    def _take_cache_types(self) -> None:
        """Make `auto` concrete in both types: one that is given holds for the other one, too."""
        names = ("cache_type_k", "cache_type_v")
        for name in names:
            _check_choice(name, getattr(self, name), ("auto", *INTEGER_CACHE_TYPES), NEAREST_CACHE_TYPES)
        given = {getattr(self, name) for name in names} - {"auto"}
        if len(given) > 1:
            raise ConfigError(
                f"cache_type_k {self.cache_type_k} and cache_type_v {self.cache_type_v} must be the same: "
                "give one of them, which holds for both"
            )
        for name in names:
            object.__setattr__(self, name, next(iter(given), DEFAULT_CACHE_TYPE))

    def _check_model_draft(self) -> None:
        if not isinstance(self.model_draft, str) or not self.model_draft:
            raise ConfigError(
                f"model_draft (--model-draft) must be the path of a drafter, not {shown(self.model_draft)}"
            )
        if self.spec_type not in ("auto", "dflash", "mtp"):
            raise ConfigError(
                f"model_draft (--model-draft) is for spec_type dflash or mtp, not {self.spec_type}: leave "
                "one out"
            )

    def _check_plan(self) -> None:
        if not isinstance(self.plan, str) or not self.plan:
            raise ConfigError(f"plan (--plan) must be the path of a file, not {shown(self.plan)}")
        for name in _PLANNED:
            default = type(self).__dataclass_fields__[name].default
            if name.startswith("cache_type"):
                default = DEFAULT_CACHE_TYPE
            if getattr(self, name) != default:
                flag = name.replace("_", "-")
                raise ConfigError(f"{name} (--{flag}) is part of the plan: leave it out, or --plan")

    def with_budget(self, memory: Tier, num_bytes: int) -> "EngineConfig":
        """The same with a budget of a GPU's memory or of RAM."""
        return replace(self, vram=num_bytes) if memory == "vram" else replace(self, ram=num_bytes)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """The configuration with these fields; paths may be path objects, and `ctx_size` a text such as 32k.

        Raises ConfigError, with advice, for a key that is none.
        """
        names = [field.name for field in fields(cls)]
        for key in options:
            if key not in names:
                raise ConfigError(f"unknown setting {key}: {_advice(key, names)}")
        paths = {
            name: os.fspath(options[name])
            for name in ("model", "plan", "model_draft", "chat_template")
            if isinstance(options.get(name), os.PathLike)
        }
        context = {"ctx_size": _num_tokens(options["ctx_size"])} if "ctx_size" in options else {}
        return cls(**{**options, **paths, **context})


def parse_size(text: str) -> int:
    """A size as people write it, here and on the command line: 8192, 8k, 10G, 1.5GiB. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 4096, 8k or 10G")
    return int(float(match[1]) * _UNITS[match[2]])


def _num_tokens(value: object) -> object:
    """A context as people write it as a number; what is no text stays."""
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ValueError:
        message = f"ctx_size (--ctx-size) must be a number of tokens such as 8192 or 32k, not {shown(value)}"
        raise ConfigError(message) from None


def _advice(key: str, names: Sequence[str]) -> str:
    """What to do instead of giving the unknown setting `key`."""
    if key in _OTHER_SETTINGS:
        return _OTHER_SETTINGS[key]
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def _budget(name: str, value: object) -> int | str:
    """A budget of memory in bytes, or "auto"."""
    if value == "auto":
        return "auto"
    flag = f"{name} (--{name})"
    if isinstance(value, str):
        if "," in value:
            raise ConfigError(f"{flag} is one size, of the memory of {_OWNERS[name]}, not {shown(value)}")
        try:
            value = parse_size(value)
        except ValueError:
            raise ConfigError(f"{flag} must be a size such as 6G, or auto, not {shown(value)}") from None
    _check_integer(flag, value, 0, MAX_BYTES)
    assert isinstance(value, int)
    return value


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {shown(value)}")


def _check_choice(
    name: str, value: object, choices: Collection[str], nearest: Mapping[str, str] | None = None
) -> None:
    """nearest: the choice to advise for some of the others."""
    if isinstance(value, str) and value in choices:
        return
    advice = f": try {nearest[value]}" if nearest and isinstance(value, str) and value in nearest else ""
    raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}{advice}")
