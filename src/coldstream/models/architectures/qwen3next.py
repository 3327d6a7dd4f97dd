"""Qwen3-Next: the parts of `qwen35moe` with the DeltaNet's projections in the layout of the checkpoint.

The checkpoint keeps the rows of a key head together. With d = state size and r value heads a key head:

    ssm_ba   r rows of beta, r rows of alpha
    ssm_in   d of the query, d of the key, r·d of the values, r·d of the gates (z)

`ssm_in` is in files of the first converters only; later ones write `attn_qkv` and `attn_gate`, whose rows are
all queries, all keys, all values, and all gates. Blocks of weights lie within a row, so the matrices that a
model reads apart are exact copies of rows, whatever the type. Value heads stay grouped everywhere.
Source: the converter of llama.cpp, and `Qwen3NextGatedDeltaNet` of transformers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

from coldstream.models.architectures.architecture import Architecture, GatheredRows
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import hybrid_layers, read_attention, read_delta_net, read_moe
from coldstream.models.spec.layer_specs import DeltaNetSpec, LayerSpec
from coldstream.models.spec.layer_tensors import Requirement, each, hybrid_block_tensors, together


def _layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    attentions = read_attention(keys, output_gate="query", qk_norm="head")
    delta_net = read_delta_net(keys, value_heads_grouped=True)
    return hybrid_layers(keys, attentions, delta_net, read_moe(keys, shared="gated"))


def _projections(spec: DeltaNetSpec, hidden: int) -> tuple[Requirement, ...]:
    apart = together(
        {"attn_qkv.weight": (spec.conv_dim, hidden), "attn_gate.weight": (spec.value_dim, hidden)}
    )
    by_key_head = together({"ssm_in.weight": (spec.conv_dim + spec.value_dim, hidden)})
    gates = each({"ssm_ba.weight": (2 * spec.num_value_heads, hidden)})
    return ((apart, by_key_head), *gates)


def _gathered(layer: LayerSpec) -> Mapping[str, GatheredRows]:
    spec = layer.mixer
    if not isinstance(spec, DeltaNetSpec):
        return {}
    beta, alpha = _by_key_head(spec, (spec.value_heads_per_key_head,) * 2)
    values = spec.value_heads_per_key_head * spec.state_size
    query, key, value, gate = _by_key_head(spec, (spec.state_size, spec.state_size, values, values))
    return {
        "ssm_beta": GatheredRows("ssm_ba", beta),
        "ssm_alpha": GatheredRows("ssm_ba", alpha),
        "attn_qkv": GatheredRows("ssm_in", query + key + value),
        "attn_gate": GatheredRows("ssm_in", gate),
    }


def _by_key_head(spec: DeltaNetSpec, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The rows of each part of a matrix that has, key head after key head, `sizes` rows of each part."""
    stride = sum(sizes)
    begins = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        tuple(head * stride + begin + row for head in range(spec.num_key_heads) for row in range(size))
        for begin, size in zip(begins, sizes, strict=True)
    ]


QWEN3NEXT: Final = Architecture(
    "qwen3next", _layers, partial(hybrid_block_tensors, projections=_projections), _gathered
)
