"""Reads the spec of a DFlash drafter from the metadata of a GGUF file.

Two conventions exist. Mainline's architecture is `dflash`: its `target_layers` are the layers *before* which
the target's residual stream is read, one more than Hugging Face's numbers, and the mask token is a key of the
tokenizer. The older architectures `dflash-draft` and `qwen35-dflash-draft` have Hugging Face's numbers in
keys behind `<architecture>.dflash.`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.messages import RECONVERT
from coldstream.gguf.metadata import Metadata
from coldstream.kernels.rope.scaling import Yarn, yarn_magnitude
from coldstream.models.dflash import spec as limits
from coldstream.models.dflash.numbers import check_numbers, read_second
from coldstream.models.dflash.rope import DflashRope
from coldstream.models.dflash.spec import DflashSpec, layers_of
from coldstream.models.spec.hyperparameters import MAX_HEADS

_TOKENS: Final = "tokenizer.ggml.tokens"
# Values that change nothing, of keys for what is not computed here.
_NEUTRAL: Final[Mapping[str, float]] = {
    "logit_scale": 1.0, "embedding_scale": 1.0, "final_logit_softcapping": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip
_KNOWN: Final = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.sliding_window_pattern",
    "attention.causal", "rope.freq_base", "rope.dimension_count", "rope.dimension_sections",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", *_NEUTRAL,
}  # fmt: skip


@dataclass(frozen=True)
class _Convention:
    """What an architecture calls a drafter's own numbers."""

    prefix: str  # behind the architecture and its dot
    taps: str
    tap_offset: int  # of the file's numbers above Hugging Face's
    mask_id: str | None  # None: a key of the tokenizer
    num_target_layers: str | None = None
    others: tuple[str, ...] = ()  # that say nothing which is not said elsewhere

    @property
    def own(self) -> set[str]:
        names = (self.taps, self.mask_id, self.num_target_layers, "block_size", *_SECOND_NAMES, *self.others)
        return {f"{self.prefix}{name}" for name in names if name is not None}


_SECOND_NAMES: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OLDER: Final = _Convention(
    "dflash.", "target_layer_ids", 0, "mask_token_id", "n_target_layers", ("n_target_features",)
)
ARCHITECTURES: Final[Mapping[str, _Convention]] = {
    "dflash": _Convention("", "target_layers", 1, None),
    "dflash-draft": _OLDER,
    "qwen35-dflash-draft": _OLDER,
}


def is_dflash(metadata: Mapping[str, object]) -> bool:
    """Whether a GGUF file with this metadata says that it is a DFlash drafter."""
    return metadata.get("general.architecture") in ARCHITECTURES


def spec_of_metadata(keys: Metadata) -> DflashSpec:
    """The spec that the metadata of a GGUF file gives.

    Raises UnsupportedError for another architecture and for what is not computed here, and InconsistentError
    or LimitError, naming the key.
    """
    name = keys.text("general.architecture")
    if name not in ARCHITECTURES:
        problem = f"{name!r:.60}, drafters are {', '.join(ARCHITECTURES)}: give a DFlash drafter"
        raise keys.error(UnsupportedError, "general.architecture", problem)
    return _Reader(keys, name, ARCHITECTURES[name]).spec()


@dataclass(frozen=True)
class _Reader:
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
        taps = self._taps()
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
            taps=taps,
            num_target_layers=self._num_target_layers(taps),
            layers=layers_of(windows, keys.flag(causal) if causal in keys else None),
            second=self._second(hidden_size, vocab_size),
        )
        self._check_heads(head_dim)
        check_numbers(
            spec,
            keys,
            taps=self.own(self.convention.taps),
            num_kv_heads=self.key("attention.head_count_kv"),
            head_dim=self.key("attention.key_length"),
        )
        return spec

    def _second(self, hidden_size: int, vocab_size: int) -> limits.Dflash2Spec | None:
        kernel, group, rank, top_k = (self.own(name) for name in _SECOND_NAMES)
        return read_second(self.keys, (kernel, group, rank, top_k), hidden_size, vocab_size)

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
        return "tokenizer.ggml.mask_token_id" if mask_id is None else self.own(mask_id)

    def _vocab_size(self) -> int:
        tokens = self.keys.get(_TOKENS)
        count = len(tokens) if isinstance(tokens, list) else None
        vocab_size = self.integer("vocab_size", 1, limits.MAX_VOCAB_SIZE, count)
        if count is not None and count != vocab_size:
            problem = f"{count} tokens, but {self.key('vocab_size')} is {vocab_size}: {RECONVERT}"
            raise self.keys.error(InconsistentError, _TOKENS, problem)
        return vocab_size

    def _taps(self) -> tuple[int, ...]:
        offset = self.convention.tap_offset
        values = self.keys.integers(self.own(self.convention.taps), offset, limits.MAX_TAP_ID)
        return tuple(value - offset for value in values)

    def _num_target_layers(self, taps: tuple[int, ...]) -> int | None:
        """Converters have written the number of taps there too, which says nothing of the target."""
        name = self.convention.num_target_layers
        if name is None or self.own(name) not in self.keys:
            return None
        value = self.keys.integer(self.own(name), 1, limits.MAX_TAP_ID)
        return None if value == len(taps) else value

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
        )
        return DflashRope(theta, yarn, magnitude * yarn_magnitude(factor))
