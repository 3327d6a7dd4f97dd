"""Reads how a file stretches its rotary embeddings, and which position streams its sections name.

The keys are those of all families and of drafters. They mean what they do in llama.cpp. A factor without a
type is linear, and a factor of 0 is none. The factor of attention scales cosines and sines whatever the type.
"""

from dataclasses import dataclass, replace
from typing import Final

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.metadata import Metadata
from coldstream.kernels.ops import RopeScaling, RopeSpec
from coldstream.kernels.rope.scaling import Yarn, linear, yarn_magnitude

_MAX_CONTEXT: Final = 1 << 24
_TYPES: Final = ("none", "default", "linear", "yarn")
# Of YaRN, with the values that they have where they are absent. Other programs ignore other values or take
# them, depending on the family.
_YARN_CONSTANTS: Final = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
_YARN_BETAS: Final = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}


@dataclass(frozen=True)
class YarnRules:
    """What a family says of YaRN."""

    has_betas: bool = False  # whether the keys of both betas count; others than the usual are refused if not
    truncate: bool = True  # see `Yarn`


USUAL_YARN: Final = YarnRules()


def read_scaling(
    keys: Metadata, prefix: str, plain: RopeSpec, context_length: int, rules: YarnRules = USUAL_YARN
) -> RopeScaling | None:
    """The scaling of `plain` that the keys `{prefix}.rope.…` ask for; None for none.

    Raises UnsupportedError for a type or a constant that is not computed, and otherwise as `Metadata`.
    """
    kind = keys.text(f"{prefix}.rope.scaling.type", "linear")
    if kind not in _TYPES:
        problem = f"{kind!r:.40}, supported: none, linear and yarn"
        raise keys.error(UnsupportedError, f"{prefix}.rope.scaling.type", problem)
    magnitude = keys.number(f"{prefix}.rope.scaling.attn_factor", 1e-3, 1e3, 1.0)
    older = keys.number(f"{prefix}.rope.scale_linear", 0.0, 1e6, 0.0)
    factor = keys.number(f"{prefix}.rope.scaling.factor", 0.0, 1e6, older) or 1.0
    if kind == "yarn":
        fast, slow = _read_betas(keys, prefix, rules)
        yarn = Yarn(factor, context_length, fast, slow, rules.truncate)
        return _yarn(keys, prefix, plain, yarn, magnitude)
    return linear(plain, factor if kind == "linear" else 1.0, magnitude)


def _read_betas(keys: Metadata, prefix: str, rules: YarnRules) -> tuple[float, float]:
    """The fast one, then the slow one."""
    found = {}
    for name, usual in _YARN_BETAS.items():
        key = f"{prefix}.rope.scaling.{name}"
        found[name] = keys.number(key, 1e-3, 1e6, usual)
        if found[name] != usual and not rules.has_betas:
            raise keys.error(UnsupportedError, key, f"{found[name]:g}, supported: {usual:g}")
    fast, slow = found.values()
    if fast <= slow:
        problem = f"{fast:g}, expected more than that of slow dimensions, {slow:g}"
        raise keys.error(InconsistentError, f"{prefix}.rope.scaling.yarn_beta_fast", problem)
    return fast, slow


def _yarn(keys: Metadata, prefix: str, plain: RopeSpec, yarn: Yarn, magnitude: float) -> RopeScaling | None:
    """That by `yarn` with the original context that the file states, if it states one."""
    for name, value in _YARN_CONSTANTS.items():
        key = f"{prefix}.rope.scaling.{name}"
        found = keys.number(key, -1e6, 1e6, value)
        if found != value:
            raise keys.error(UnsupportedError, key, f"{found:g}, supported: {value:g}")
    original = keys.integer(f"{prefix}.rope.scaling.original_context_length", 0, _MAX_CONTEXT, 0)
    if yarn.factor == 1:
        return linear(plain, 1.0, magnitude)
    if plain.theta <= 1:
        problem = f"{plain.theta:g}, expected more than 1 with YaRN"
        raise keys.error(InconsistentError, f"{prefix}.rope.freq_base", problem)
    yarn = replace(yarn, original_context=original or yarn.original_context)
    return RopeScaling(yarn.frequency_factors(plain), magnitude * yarn_magnitude(yarn.factor))


def check_sections(keys: Metadata, prefix: str, num_dims: int) -> None:
    """Checks that each pair of dimensions turns with a position that text has: the first three are alike.

    The sections of the streams alternate over the pairs. A pair that belongs to none of the first three turns
    with a fourth stream, which for text is 0 in one program and the position in another. Without the key all
    is well. Raises UnsupportedError.
    """
    key = f"{prefix}.rope.dimension_sections"
    if key not in keys:
        return
    sections = keys.integers(key, 0, 1024)
    period = sum(sections)
    for pair in range(num_dims // 2 if period else 0):
        place = pair % period
        stream = place % 3
        if stream >= len(sections) or place >= 3 * sections[stream]:
            problem = (
                f"{list(sections)} gives the pair {pair} of {num_dims // 2} to a fourth stream of positions"
            )
            raise keys.error(UnsupportedError, key, f"{problem}, supported: three streams over all pairs")
