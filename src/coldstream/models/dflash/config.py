"""Reads the spec of a DFlash drafter from the config.json of a Hugging Face folder.

The numbers lie at the top level or in `dflash_config`, and the rotary embedding in `rope_parameters` or in
`rope_theta` and `rope_scaling`, by the time of the drafter's release. Revisions of one drafter differ in
layers, heads, auxiliary layers, stretching and windows, so nothing is derived from other sizes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.gguf.metadata import Metadata, Value
from coldstream.kernels.rope.scaling import Yarn, yarn_magnitude
from coldstream.models.dflash import spec as limits
from coldstream.models.dflash.metadata import OTHER_DRAFTERS, check_numbers, read_second
from coldstream.models.dflash.safetensors import read_object
from coldstream.models.dflash.spec import DflashRope, DflashSpec, layers_of
from coldstream.models.spec.hyperparameters import MAX_HEADS

MAX_CONFIG_BYTES: Final = 1 << 20
_SECTION: Final = "dflash_config"
_LAGUNA: Final = "DFlashLagunaForCausalLM"
# Whether it is of the second kind.
_KINDS: Final = {"DFlashDraftModel": False, "DFlash2DraftModel": True, _LAGUNA: False}
# What other programs draft with, by a part of the name that its configurations have.
_OTHERS: Final[Mapping[str, str]] = {
    "eagle": OTHER_DRAFTERS["eagle3"],
    "assistant": OTHER_DRAFTERS["gemma4-assistant"],
    "dspark": "a DSpark drafter",
    "domino": "a Domino drafter",
}
_SECOND_KEYS: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OTHERWISE: Final = "choose another drafter, or draft by --spec-type ngram"
# Values that change nothing, of keys for what is not computed here.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
    "num_experts": (0,),
}
_ROPE_KEYS: Final = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor", "partial_rotary_factor", "truncate",
}  # fmt: skip
_SECTION_KEYS: Final = {
    "target_layer_ids", "mask_token_id", "block_size", "is_causal", "causal", "num_target_layers",
    *_SECOND_KEYS,
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
}  # fmt: skip
_FOREIGN: Final = {
    "speculators_model_type",
    "speculators_config",
    "quantization_config",
    "sample_from_anchor",
}
_FLOATS: Final = {
    "rms_norm_eps", "rope_theta", "factor", "beta_fast", "beta_slow", "attention_factor",
    "final_logit_softcapping",
}  # fmt: skip


def read_config(path: Path) -> DflashSpec:
    """The spec in the file at `path`.

    Raises ModelNotFoundError if it cannot be read, and otherwise InconsistentError, LimitError,
    DuplicateError or UnsupportedError, naming the key.
    """
    config = read_object(path, MAX_CONFIG_BYTES, "A drafter's folder has it beside its weights")
    return spec_of_config(config, path)


def spec_of_config(config: Mapping[str, Any], path: Path) -> DflashSpec:
    """The spec that the contents of a config.json give; `path` is for messages. Raises as `read_config`."""
    _refuse_others(config, path)
    keys = _flattened(config, path)
    _refuse_unknown(keys)
    hidden_size = keys.integer("hidden_size", 1, limits.MAX_WIDTH)
    num_heads = keys.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = keys.integer("num_key_value_heads", 1, MAX_HEADS)
    head_dim = keys.integer("head_dim", 2, limits.MAX_HEAD_DIM)
    vocab_size = keys.integer("vocab_size", 1, limits.MAX_VOCAB_SIZE)
    windows = _windows(keys, keys.integer("num_hidden_layers", 1, limits.MAX_DFLASH_LAYERS))
    is_laguna = _is_laguna(keys)
    num_target_layers = None
    if "num_target_layers" in keys:
        num_target_layers = keys.integer("num_target_layers", 1, limits.MAX_TARGET_LAYERS)
    spec = DflashSpec(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=keys.integer("intermediate_size", 1, limits.MAX_FFN_SIZE),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-12, 0.1),
        rope=_rope(keys),
        block_size=keys.integer("block_size", 2, limits.MAX_BLOCK_SIZE),
        mask_id=keys.integer("mask_token_id", 0, vocab_size - 1),
        aux_layers=keys.integers("target_layer_ids", 0, limits.MAX_TARGET_LAYERS),
        num_target_layers=num_target_layers,
        layers=layers_of(
            windows, keys.flag("is_causal") if "is_causal" in keys else None, is_laguna=is_laguna
        ),
        second=read_second(keys, _SECOND_KEYS, hidden_size, vocab_size),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, 1e6, 0.0),
        is_laguna=is_laguna,
        has_attention_bias="attention_bias" in keys and keys.flag("attention_bias"),
    )
    check_numbers(
        spec, keys, aux_layers="target_layer_ids", num_kv_heads="num_key_value_heads", head_dim="head_dim"
    )
    return spec


def _flattened(config: Mapping[str, Any], path: Path) -> Metadata:
    """All values by their own names, rotary ones behind `rope.`; null counts as absent.

    Raises UnsupportedError for keys of sections that are not known, and InconsistentError if two places
    contradict each other.
    """
    values: dict[str, Value] = {}

    def add(name: str, value: object) -> None:
        if value is None:
            return
        found = _value(name.removeprefix("rope."), value)
        if name in values and not np.array_equal(values[name], found):  # lists have lengths of their own
            problem = f"{value!r:.40} in one place, {values[name]!r:.40} in another: use a published revision"
            raise InconsistentError(f"{shorten(path)}: {name}: {problem}")
        values[name] = found

    for name, value in config.items():
        if name not in (_SECTION, "rope_parameters", "rope_scaling", "rope_theta"):
            add(name, value)
    for name, value in _section(config, _SECTION, path).items():
        if name not in _SECTION_KEYS:
            raise _unknown(path, f"{_SECTION}.{name}")
        add("is_causal" if name == "causal" else name, value)
    add("rope.rope_theta", config.get("rope_theta"))
    for section in ("rope_parameters", "rope_scaling"):
        for name, value in _section(config, section, path).items():
            if name not in _ROPE_KEYS:
                raise _unknown(path, f"{section}.{name}")
            add("rope.rope_type" if name == "type" else f"rope.{name}", value)
    return Metadata(values, {}, path)


def _section(config: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    section = config.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise InconsistentError(f"{shorten(path)}: {name}: {section!r:.40}, expected an object")
    return section


def _value(name: str, value: object) -> Value:
    """A JSON value as metadata has it; what is of no such type shows as an empty list of text."""
    if name in _FLOATS and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1 << 53 else np.inf
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return list(value)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return np.array(value)
    return []


def _unknown(path: Path, key: str) -> UnsupportedError:
    return UnsupportedError(
        f"{shorten(path)}: {key:.80}: this drafter has something that is not supported here: choose another "
        "drafter for the model"
    )


def _refuse_others(config: Mapping[str, Any], path: Path) -> None:
    """Before keys are read, of which others have some that say less than the name."""
    for name in _names(config.get("architectures")):
        if name not in _KINDS:
            found = (what for part, what in _OTHERS.items() if part in name.lower())
            what = next((f"{each}, which is not supported" for each in found), None)
            what = what or f"supported are {', '.join(_KINDS)}"
            raise UnsupportedError(f"{shorten(path)}: architectures: {name!r:.60}, {what}: {_OTHERWISE}")


def _names(architectures: object) -> list[str]:
    """Of a configuration, which has a list of one."""
    found = architectures if isinstance(architectures, list) else [architectures]
    return [str(name) for name in found if name is not None]


def _refuse_unknown(keys: Metadata) -> None:
    for name in _FOREIGN:
        if name in keys:
            raise _unknown(keys.path, name)
    for name, allowed in _NEUTRAL.items():
        for key in (name, f"rope.{name}"):
            value = keys.get(key, allowed[0])
            if isinstance(value, np.ndarray) or value not in allowed:
                problem = f"{value!r:.40}, supported is {allowed[-1]!r}: {_OTHERWISE}"
                raise keys.error(UnsupportedError, name, problem)
    for name in _names(keys.get("architectures")):
        has_second = any(key in keys for key in _SECOND_KEYS)
        if _KINDS[name] != has_second:
            problem = f"{name}, but {'there are' if has_second else 'it lacks'} {', '.join(_SECOND_KEYS)}"
            raise keys.error(InconsistentError, "architectures", problem)


def _is_laguna(keys: Metadata) -> bool:
    """Whether it is a drafter of Laguna, with gates of heads and the vocabulary of its target."""
    if _LAGUNA not in _names(keys.get("architectures")):
        return False
    gating = keys.get("gating", True)
    if not (gating is True or gating == "per-head"):
        problem = f"{gating!r:.40}, supported is 'per-head': choose another drafter"
        raise keys.error(UnsupportedError, "gating", problem)
    vocab_size = keys.integer("vocab_size", 1, limits.MAX_VOCAB_SIZE)
    if keys.integer("draft_vocab_size", 1, limits.MAX_VOCAB_SIZE, vocab_size) != vocab_size:
        problem = f"not the {vocab_size} tokens of its target: choose another drafter"
        raise keys.error(UnsupportedError, "draft_vocab_size", problem)
    return True


def _windows(keys: Metadata, num_layers: int) -> tuple[int | None, ...]:
    """The window of every layer, as transformers reads a Qwen3 configuration."""
    types = keys.get("layer_types")
    uses = keys.flag("use_sliding_window") if "use_sliding_window" in keys else None
    if types is None:
        if not uses:
            return (None,) * num_layers
        first = keys.integer("max_window_layers", 0, 1 << 20, 28)
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise keys.error(InconsistentError, "layer_types", f"expected the types of {num_layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise keys.error(UnsupportedError, "layer_types", f"{name!r:.60}: choose another drafter")
    if "sliding_attention" not in types:
        return (None,) * num_layers
    if uses is False:
        problem = "false, but layer_types has sliding_attention: use a published revision"
        raise keys.error(InconsistentError, "use_sliding_window", problem)
    window = keys.integer("sliding_window", 1, limits.MAX_POSITIONS)
    return tuple(window if name == "sliding_attention" else None for name in types)


def _rope(keys: Metadata) -> DflashRope:
    theta = keys.number("rope.rope_theta", 2.0, 1e15)
    kind = keys.text("rope.rope_type", "default")
    if kind not in ("default", "yarn"):
        problem = f"{kind!r:.40}, supported are default and yarn: choose another drafter"
        raise keys.error(UnsupportedError, "rope.rope_type", problem)
    if kind == "default":
        return DflashRope(theta)
    factor = keys.number("rope.factor", 1.0, 1e6)
    yarn = Yarn(
        factor=factor,
        original_context=keys.integer("rope.original_max_position_embeddings", 1, limits.MAX_POSITIONS),
        beta_fast=keys.number("rope.beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=keys.number("rope.beta_slow", 1e-3, 1e6, 1.0),
        truncate="rope.truncate" not in keys or keys.flag("rope.truncate"),
    )
    magnitude = keys.number("rope.attention_factor", 1e-3, 1e3, yarn_magnitude(factor))
    return DflashRope(theta, yarn, magnitude)
