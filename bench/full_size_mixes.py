"""Which weight types the tensors of published files have, by the name that people download: the mixes of
full_size_model.py.

A mix is a list of rules over the names of matrices; the first that fits gives the type. Everything else is
F32 in all of them, the routers too. Each mix says where its types come from. llama-quantize's rules are those
of early 2026, when these files were made. Later versions treat `attn_qkv` like `attn_v`.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from coldstream.gguf.quant_types import QuantType

Layers = Callable[[int, int], bool]  # (layer, number of layers) → whether a rule holds there


def takes_more_bits(index: int, count: int) -> bool:
    """llama-quantize's rule for tensors that it keeps in Q6_K: the outer eighths and every third between.

    A block for multi-token prediction, whose index is `count`, is among them.
    """
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def attention_takes_more_bits(layer: int, count: int) -> bool:
    """The same for `attn_v`: llama-quantize counts these by themselves, against the layers of both kinds."""
    return layer >= count or takes_more_bits(layer // 4, count)


def every_layer(layer: int, count: int) -> bool:
    """Where most rules hold."""
    return True


def first(number: int) -> Layers:
    """The first layers."""
    return lambda layer, _: layer < number


def outer(number: int) -> Layers:
    """So many layers at either end; a block for multi-token prediction is among them."""
    return lambda layer, count: layer < number or layer >= count - number


@dataclass(frozen=True)
class Rule:
    """Matrices whose names fit one of `names`, without `blk.N.` and `.weight`, have a type."""

    names: str  # patterns, separated by spaces
    type_name: str
    layers: Layers = every_layer

    def fits(self, name: str, layer: int, count: int) -> bool:
        """layer: that of the matrix; 0 for the two tables, which belong to none."""
        return any(fnmatchcase(name, names) for names in self.names.split()) and self.layers(layer, count)


@dataclass(frozen=True)
class Mix:
    """A mix: `file_type` as `general.file_type` has it, and rules that fit every matrix."""

    name: str
    file_type: int
    source: str
    rules: tuple[Rule, ...]

    def type_of(self, name: str, layer: int, count: int) -> QuantType:
        """The type of a matrix of a model of `count` layers.

        Raises UnknownTypeError if this version does not know it.
        """
        type_name = self.type_name_of(name, layer, count)
        if type_name not in QuantType.__members__:
            raise UnknownTypeError(f"mix {self.name} has {name} in {type_name}, which this version lacks")
        return QuantType[type_name]

    def type_name_of(self, name: str, layer: int, count: int) -> str:
        """The same by its name, whether this version knows it or not."""
        return next(rule.type_name for rule in self.rules if rule.fits(name, layer, count))

    @property
    def unknown_types(self) -> list[str]:
        """Types that this version lacks."""
        return sorted({rule.type_name for rule in self.rules} - set(QuantType.__members__))


class UnknownTypeError(ValueError):
    """A mix has a weight type that this version does not know."""


MIXES = {
    mix.name: mix
    for mix in (
        Mix(
            "Q4_K_M",
            15,
            "plain llama-quantize; the counts of published files are 301 F32, 355 Q4_K, 30 Q5_K, 47 Q6_K",
            (
                Rule("output", "Q6_K"),
                Rule("attn_qkv", "Q5_K"),
                Rule("attn_v", "Q6_K", attention_takes_more_bits),
                Rule("ffn_down*", "Q6_K", takes_more_bits),
                Rule("*", "Q4_K"),
            ),
        ),
        Mix(
            "UD-Q4_K_XL",
            15,
            "listing of Unsloth's Qwen3.6-35B-A3B file (22.4 GB). It has gate and up of one layer in Q5_K"
            " and down of four layers in Q6_K: the first ones here",
            (
                Rule("ssm_alpha ssm_beta", "F32"),
                Rule("ffn_gate*_exps ffn_up_exps", "Q5_K", first(1)),
                Rule("ffn_gate*_exps ffn_up_exps", "Q4_K"),
                Rule("ffn_down_exps", "Q6_K", first(4)),
                Rule("ffn_down_exps", "Q5_K"),
                Rule("*", "Q8_0"),
            ),
        ),
        Mix(
            "UD-IQ3_S",
            26,
            "Unsloth's Qwen3.6-35B-A3B file of 12.73 GiB: experts as infr's test moe_id_gemv_real_dims names"
            " them; all else in Q6_K gives that size within 1 %",
            (
                Rule("ssm_alpha ssm_beta", "F32"),
                Rule("ffn_gate*_exps ffn_up_exps", "IQ2_S"),
                Rule("ffn_down_exps", "IQ3_S"),
                Rule("*", "Q6_K"),
            ),
        ),
        Mix(
            "APEX-Quality",
            18,
            "the profile that APEX publishes, and tables in Q6_K, which give the 21.3 GiB of its file",
            (
                Rule("*_exps", "Q6_K", outer(5)),
                Rule("*_exps", "Q5_K", outer(10)),
                Rule("*_exps", "IQ4_XS"),
                Rule("*_shexp", "Q8_0"),
                Rule("*", "Q6_K"),
            ),
        ),
        Mix(
            "APEX-Nano",
            12,
            "the profile that APEX publishes; tables in Q6_K and Q4_K give the 10.88 GiB of its file"
            " within 1 %",
            (
                Rule("output", "Q6_K"),
                Rule("token_embd", "Q4_K"),
                Rule("*_exps", "Q3_K", outer(5)),
                Rule("*_exps", "IQ2_S", outer(10)),
                Rule("*_exps", "IQ2_XXS"),
                Rule("*_shexp", "Q5_K", outer(5)),
                Rule("*_shexp", "Q4_K"),
                Rule("*", "Q4_K", outer(3)),
                Rule("*", "Q3_K"),
            ),
        ),
        Mix(
            "IQ4_XS",
            30,
            "plain llama-quantize with an importance matrix",
            (Rule("output", "Q6_K"), Rule("attn_v", "Q5_K"), Rule("*", "IQ4_XS")),
        ),
        Mix(
            "Q2_K",
            10,
            "plain llama-quantize; experts as in bartowski's Qwen3.6-35B-A3B file",
            (
                Rule("output", "Q6_K"),
                Rule("attn_v", "Q4_K"),
                Rule("ffn_down* attn_output", "Q3_K"),
                Rule("*", "Q2_K"),
            ),
        ),
        Mix(
            "MXFP4",
            38,
            "plain llama-quantize MXFP4_MOE; Unsloth's file of that name has its ffn_down_exps in Q5_K",
            (Rule("*_exps", "MXFP4"), Rule("*", "Q8_0")),
        ),
        Mix(
            "Q2_0",
            41,
            "plain llama-quantize",
            (Rule("output", "Q6_K"), Rule("token_embd", "Q4_K"), Rule("*", "Q2_0")),
        ),
        Mix(
            "Q2_0-experts",
            41,
            "Q2_0 for what a GPU rarely holds whole, and Q6_K for what each token reads",
            (Rule("*_exps", "Q2_0"), Rule("per_layer_token_embd", "Q4_K"), Rule("*", "Q6_K")),
        ),
        Mix(
            "IQ3_S-experts",
            26,
            "the same with experts in IQ3_S",
            (Rule("*_exps", "IQ3_S"), Rule("per_layer_token_embd", "Q4_K"), Rule("*", "Q6_K")),
        ),
    )
}
PLAIN = MIXES["Q4_K_M"]


def mix_named(name: str) -> Mix:
    """A mix for a command line. Raises argparse.ArgumentTypeError if there is none or a type is unknown."""
    if name not in MIXES:
        raise argparse.ArgumentTypeError(f"no mix {name!r}: there are {', '.join(MIXES)}")
    if unknown := MIXES[name].unknown_types:
        raise argparse.ArgumentTypeError(
            f"mix {name} has tensors in {', '.join(unknown)}, which this version lacks"
        )
    return MIXES[name]
