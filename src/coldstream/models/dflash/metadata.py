"""The metadata of a DFlash drafter's GGUF file: read into a spec, and written from one.

Two conventions exist. Mainline's architecture is `dflash`. Its `target_layers` are the layers *before* which
the target's residual stream is read, one more than Hugging Face's numbers. The mask token is a key of the
tokenizer. `num_target_layers` and `rope.scaling.yarn_truncate` are keys of ours, which other programs ignore.
The older architectures `dflash-draft` and `qwen35-dflash-draft` have Hugging Face's numbers in keys behind
`<architecture>.dflash.`. No key of either says whether attention has biases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from coldstream.errors import InconsistentError, LimitError, UnsupportedError
from coldstream.gguf.header_bytes import MetaValue
from coldstream.gguf.messages import RECONVERT
from coldstream.gguf.metadata import Metadata
from coldstream.kernels.rope.scaling import Yarn, yarn_magnitude
from coldstream.models.dflash import spec as limits
from coldstream.models.dflash.spec import Dflash2Spec, DflashRope, DflashSpec, layers_of
from coldstream.models.spec.hyperparameters import MAX_HEADS

_TOKENS: Final = "tokenizer.ggml.tokens"
_MASK_ID: Final = "tokenizer.ggml.mask_token_id"
_SOFTCAP: Final = "final_logit_softcapping"
_TRUNCATE: Final = "rope.scaling.yarn_truncate"  # see `Yarn`; true if it is absent, as for mainline
# Values that change nothing, of keys for what is not computed here.
_NEUTRAL: Final[Mapping[str, float]] = {
    "logit_scale": 1.0, "embedding_scale": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip
_KNOWN: Final = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.sliding_window_pattern",
    "attention.causal", "rope.freq_base", "rope.dimension_count", "rope.dimension_sections",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", _TRUNCATE, _SOFTCAP, *_NEUTRAL,
}  # fmt: skip


@dataclass(frozen=True)
class _Convention:
    """What an architecture calls a drafter's own numbers."""

    prefix: str  # behind the architecture and its dot
    aux_layers: str
    offset: int  # of the file's numbers of layers above Hugging Face's
    mask_id: str | None  # None: a key of the tokenizer
    num_target_layers: str
    others: tuple[str, ...] = ()  # further keys

    @property
    def own(self) -> set[str]:
        names = (
            self.aux_layers,
            self.mask_id,
            self.num_target_layers,
            "block_size",
            *_SECOND_NAMES,
            *self.others,
        )
        return {f"{self.prefix}{name}" for name in names if name is not None}


_DECODER: Final = "decoder_arch"  # mainline's files do not have it: whose layers a drafter's are
_LAGUNA: Final = "laguna"
_SECOND_NAMES: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_MAINLINE: Final = _Convention("", "target_layers", 1, None, "num_target_layers", (_DECODER,))
_OLDER: Final = _Convention(
    "dflash.", "target_layer_ids", 0, "mask_token_id", "n_target_layers", ("n_target_features",)
)
ARCHITECTURES: Final[Mapping[str, _Convention]] = {
    "dflash": _MAINLINE,
    "dflash-draft": _OLDER,
    "qwen35-dflash-draft": _OLDER,
}


# What other programs draft with, by the architecture that its files state.
OTHER_DRAFTERS: Final[Mapping[str, str]] = {
    "eagle3": "an EAGLE-3 head",
    "gemma4-assistant": "Gemma 4's assistant, which reads the keys and values of its model",
    "gemma4_assistant": "Gemma 4's assistant, which reads the keys and values of its model",
    "gemma4-dflash-draft": "a DFlash drafter of Gemma 4 as one other program writes it",
    "qwen35_mtp": "an MTP block under a name that converters have given up",
    "qwen35moe_mtp": "an MTP block under a name that converters have given up",
}
_GIVE: Final = (
    "give a DFlash drafter, or a sidecar with the model's MTP block alone, or draft by --spec-type ngram"
)


def spec_of_metadata(keys: Metadata) -> DflashSpec:
    """The spec that the metadata of a GGUF file gives.

    Raises UnsupportedError for another architecture and for what is not computed here, and InconsistentError
    or LimitError, naming the key.
    """
    name = keys.text("general.architecture")
    if name not in ARCHITECTURES:
        what = f"drafters are {', '.join(ARCHITECTURES)}"
        if name in OTHER_DRAFTERS:
            what = f"{OTHER_DRAFTERS[name]}, which is not supported"
        raise keys.error(UnsupportedError, "general.architecture", f"{name!r:.60}, {what}: {_GIVE}")
    return _SpecReader(keys, name, ARCHITECTURES[name]).spec()


def metadata_of(spec: DflashSpec) -> dict[str, MetaValue]:
    """The metadata of a GGUF file in mainline's convention, from which `spec_of_metadata` reads the spec.

    A float is stored as `header_bytes` does; the epsilon of norms is one of single precision, in which they
    are computed.
    """
    values: dict[str, MetaValue] = {
        "vocab_size": spec.vocab_size,
        "block_count": spec.num_layers,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.ffn_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(np.float32(spec.rms_norm_eps)),
        "block_size": spec.block_size,
        "target_layers": [layer + _MAINLINE.offset for layer in spec.aux_layers],
        **_layers_metadata(spec),
        **_rope_metadata(spec.rope),
    }
    if spec.num_target_layers is not None:
        values["num_target_layers"] = spec.num_target_layers
    if spec.is_laguna:
        values[_DECODER] = _LAGUNA
    if spec.logit_softcap:
        values[_SOFTCAP] = spec.logit_softcap
    if spec.second is not None:
        second = spec.second
        numbers = (second.conv_kernel, second.conv_group, second.selector_rank, second.selector_top_k)
        values |= dict(zip(_SECOND_NAMES, numbers, strict=True))
    named = {f"dflash.{name}": value for name, value in values.items()}
    return {"general.architecture": "dflash", **named, _MASK_ID: spec.mask_id}


def _layers_metadata(spec: DflashSpec) -> dict[str, MetaValue]:
    values: dict[str, MetaValue] = {}
    layers = spec.layers
    windows = {layer.window for layer in layers if layer.window is not None}
    if windows:
        (window,) = windows  # no file has several
        values["attention.sliding_window"] = window
        values["attention.sliding_window_pattern"] = [layer.window is not None for layer in layers]
    if layers != layers_of(tuple(layer.window for layer in layers), None, is_laguna=spec.is_laguna):
        (is_causal,) = {layer.is_causal for layer in layers}
        values["attention.causal"] = is_causal
    return values


def _rope_metadata(rope: DflashRope) -> dict[str, MetaValue]:
    values: dict[str, MetaValue] = {"rope.freq_base": rope.theta}
    magnitude = rope.magnitude
    if rope.yarn is not None:
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.yarn.factor,
            "rope.scaling.original_context_length": rope.yarn.original_context,
            "rope.scaling.yarn_beta_fast": rope.yarn.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.yarn.beta_slow,
        }
        if not rope.yarn.truncate:
            values[_TRUNCATE] = False
        magnitude /= yarn_magnitude(rope.yarn.factor)
    elif rope.divisor != 1.0:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.divisor}
    if magnitude != 1.0:
        values["rope.scaling.attn_factor"] = magnitude
    return values


@dataclass(frozen=True)
class _SpecReader:
    keys: Metadata
    architecture: str
    convention: _Convention

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def own(self, name: str) -> str:
        """A key of drafters alone."""
        return self.key(self.convention.prefix + name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        return self.keys.integer(self.key(name), low, high, default)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        return self.keys.number(self.key(name), low, high, default)

    def spec(self) -> DflashSpec:
        self._refuse_unknown()
        keys = self.keys
        hidden_size = self.integer("embedding_length", 1, limits.MAX_WIDTH)
        vocab_size = self._vocab_size()
        head_dim = self.integer("attention.key_length", 2, limits.MAX_HEAD_DIM)
        windows = self._windows(self.integer("block_count", 1, limits.MAX_DFLASH_LAYERS))
        causal = self.key("attention.causal")
        aux_layers = self._aux_layers()
        is_laguna = self._is_laguna()
        spec = DflashSpec(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_heads=self.integer("attention.head_count", 1, MAX_HEADS),
            num_kv_heads=self.integer("attention.head_count_kv", 1, MAX_HEADS),
            head_dim=head_dim,
            ffn_size=self.integer("feed_forward_length", 1, limits.MAX_FFN_SIZE),
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
            rope=self._rope(),
            block_size=keys.integer(self.own("block_size"), 2, limits.MAX_BLOCK_SIZE),
            mask_id=keys.integer(self._mask_key(), 0, vocab_size - 1),
            aux_layers=aux_layers,
            num_target_layers=self._num_target_layers(aux_layers),
            layers=layers_of(windows, keys.flag(causal) if causal in keys else None, is_laguna=is_laguna),
            second=self._second(hidden_size, vocab_size),
            logit_softcap=self.number(_SOFTCAP, 0.0, 1e6, 0.0),
            is_laguna=is_laguna,
        )
        self._check_heads(head_dim)
        check_numbers(
            spec,
            keys,
            aux_layers=self.own(self.convention.aux_layers),
            num_kv_heads=self.key("attention.head_count_kv"),
            head_dim=self.key("attention.key_length"),
        )
        return spec

    def _second(self, hidden_size: int, vocab_size: int) -> Dflash2Spec | None:
        kernel, group, rank, top_k = (self.own(name) for name in _SECOND_NAMES)
        return read_second(self.keys, (kernel, group, rank, top_k), hidden_size, vocab_size)

    def _is_laguna(self) -> bool:
        key = self.own(_DECODER)
        if key not in self.keys:
            return False
        if (decoder := self.keys.text(key)) != _LAGUNA:
            problem = f"{decoder!r:.40}, supported is {_LAGUNA}: choose another drafter"
            raise self.keys.error(UnsupportedError, key, problem)
        return True

    def _refuse_unknown(self) -> None:
        known = {self.key(name) for name in _KNOWN | self.convention.own}
        for key in self.keys:
            if key.startswith(f"{self.architecture}.") and key not in known:
                problem = "the drafter has something that is not supported here: choose another drafter"
                raise self.keys.error(UnsupportedError, f"{key:.80}", problem)
        for name, neutral in _NEUTRAL.items():
            if self.number(name, -1e30, 1e30, neutral) != neutral:
                problem = f"not {neutral}, which is not supported: choose another drafter"
                raise self.keys.error(UnsupportedError, self.key(name), problem)

    def _check_heads(self, head_dim: int) -> None:
        for name in ("attention.value_length", "rope.dimension_count"):
            if self.integer(name, 1, limits.MAX_HEAD_DIM, head_dim) != head_dim:
                problem = f"not the length of a key, {head_dim}: not supported, choose another drafter"
                raise self.keys.error(UnsupportedError, self.key(name), problem)
        sections = self.key("rope.dimension_sections")
        if sections in self.keys:
            values = self.keys.integers(sections, 0, limits.MAX_HEAD_DIM)
            if values != (head_dim // 2, 0, 0, 0):
                problem = f"{list(values)!s:.60}, expected {head_dim // 2} and zeros: choose another drafter"
                raise self.keys.error(UnsupportedError, sections, problem)

    def _mask_key(self) -> str:
        mask_id = self.convention.mask_id
        return _MASK_ID if mask_id is None else self.own(mask_id)

    def _vocab_size(self) -> int:
        tokens = self.keys.get(_TOKENS)
        count = len(tokens) if isinstance(tokens, list) else None
        vocab_size = self.integer("vocab_size", 1, limits.MAX_VOCAB_SIZE, count)
        if count is not None and count != vocab_size:
            problem = f"{count} tokens, but {self.key('vocab_size')} is {vocab_size}: {RECONVERT}"
            raise self.keys.error(InconsistentError, _TOKENS, problem)
        return vocab_size

    def _aux_layers(self) -> tuple[int, ...]:
        offset = self.convention.offset
        values = self.keys.integers(self.own(self.convention.aux_layers), offset, limits.MAX_TARGET_LAYERS)
        return tuple(value - offset for value in values)

    def _num_target_layers(self, aux_layers: tuple[int, ...]) -> int | None:
        """Older converters have written the number of auxiliary layers there too, which says nothing of the
        target.
        """
        name = self.convention.num_target_layers
        if self.own(name) not in self.keys:
            return None
        value = self.keys.integer(self.own(name), 1, limits.MAX_TARGET_LAYERS)
        return None if self.convention is _OLDER and value == len(aux_layers) else value

    def _windows(self, num_layers: int) -> tuple[int | None, ...]:
        window = self.integer("attention.sliding_window", 0, limits.MAX_POSITIONS, 0)
        key = self.key("attention.sliding_window_pattern")
        if not window and key not in self.keys:
            return (None,) * num_layers
        pattern = self.keys.flags(key)
        if len(pattern) != num_layers:
            raise self.keys.error(InconsistentError, key, f"{len(pattern)} values for {num_layers} layers")
        if any(pattern) and not window:
            problem = f"layers with a window, but {self.key('attention.sliding_window')} is none: {RECONVERT}"
            raise self.keys.error(InconsistentError, key, problem)
        return tuple(window if has_window else None for has_window in pattern)

    def _rope(self) -> DflashRope:
        theta = self.number("rope.freq_base", 2.0, 1e15)
        kind = self.keys.text(self.key("rope.scaling.type"), "linear")
        if kind not in ("none", "linear", "yarn"):
            problem = f"{kind!r:.40}, supported are none, linear and yarn: choose another drafter"
            raise self.keys.error(UnsupportedError, self.key("rope.scaling.type"), problem)
        magnitude = self.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)
        if kind != "yarn":
            divisor = self.number("rope.scaling.factor", 0.0, 1e6, 0.0) if kind == "linear" else 1.0
            return DflashRope(theta, magnitude=magnitude, divisor=divisor or 1.0)
        factor = self.number("rope.scaling.factor", 1.0, 1e6)
        yarn = Yarn(
            factor=factor,
            original_context=self.integer("rope.scaling.original_context_length", 1, limits.MAX_POSITIONS),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
            truncate=self.key(_TRUNCATE) not in self.keys or self.keys.flag(self.key(_TRUNCATE)),
        )
        return DflashRope(theta, yarn, magnitude * yarn_magnitude(factor))


def check_numbers(
    spec: DflashSpec, keys: Metadata, *, aux_layers: str, num_kv_heads: str, head_dim: str
) -> None:
    """Raises InconsistentError or LimitError for numbers that fit no drafter together, naming the key.

    aux_layers, num_kv_heads, head_dim: what the file calls them.
    """
    if spec.num_heads % spec.num_kv_heads:
        problem = f"{spec.num_kv_heads} heads of keys do not divide {spec.num_heads} of queries"
        raise keys.error(InconsistentError, num_kv_heads, problem)
    if spec.head_dim % 2:
        raise keys.error(InconsistentError, head_dim, f"{spec.head_dim} is odd, and halves are rotated")
    if not spec.aux_layers or list(spec.aux_layers) != sorted(set(spec.aux_layers)):
        problem = f"{list(spec.aux_layers)!s:.60}: expected layers in ascending order"
        raise keys.error(InconsistentError, aux_layers, problem)
    if len(spec.aux_layers) > limits.MAX_AUX_LAYERS:
        raise keys.error(
            LimitError, aux_layers, f"{len(spec.aux_layers)} layers, the limit is {limits.MAX_AUX_LAYERS}"
        )
    if spec.is_laguna and spec.second is not None:
        problem = (
            "Laguna's drafters are of the first kind, and this one has a selector: choose another drafter"
        )
        raise keys.error(UnsupportedError, aux_layers, problem)
    if spec.num_target_layers is not None and spec.aux_layers[-1] >= spec.num_target_layers:
        problem = f"layer {spec.aux_layers[-1]} of a model with {spec.num_target_layers} layers"
        raise keys.error(InconsistentError, aux_layers, problem)


def read_second(
    keys: Metadata, names: tuple[str, str, str, str], hidden_size: int, vocab_size: int
) -> Dflash2Spec | None:
    """The numbers of the second kind; None if the file has none of them.

    names: what it calls the rows of a convolution, its groups, the selector's rank and its candidates.
    """
    if not any(name in keys for name in names):
        return None
    kernel, group, rank, top_k = names
    second = Dflash2Spec(
        conv_kernel=keys.integer(kernel, 1, limits.MAX_CONV_KERNEL),
        conv_group=keys.integer(group, 1, hidden_size),
        selector_rank=keys.integer(rank, 1, limits.MAX_SELECTOR_RANK),
        selector_top_k=keys.integer(top_k, 1, min(limits.MAX_SELECTOR_TOP_K, vocab_size)),
    )
    if hidden_size % second.conv_group:
        problem = f"{second.conv_group} does not divide the hidden size {hidden_size}"
        raise keys.error(InconsistentError, group, problem)
    return second
