"""The tensors of the parts of a layer, by the names that families share, with their shapes.

Shapes are in numpy order: a weight is [out, in], a stack of experts [experts, out, in]. What converters do
differently is written as alternatives: fused or split matrices, a shape with or without a leading 1, a name
with or without `.bias`.
"""

from collections.abc import Callable, Mapping
from typing import Final

from coldstream.models.spec.layer_specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    HyperConnectionSpec,
    IndexerSpec,
    LayerSpec,
    MoeSpec,
    NgramSpec,
)

NGRAM_TABLE: Final = "per_layer_token_embd.weight"  # of the n-grams of one layer, outside its block
ROPE_FACTORS: Final = "rope_freqs.weight"  # of all layers that have `rope_factors`
OUTPUT_SCALE: Final = "layer_output_scale.weight"
Shape = tuple[int, ...]
Group = dict[str, tuple[Shape, ...]]  # tensors that come together: name → the shapes it may have
Requirement = tuple[
    Group, ...
]  # alternatives, of which the file must hold one; an empty group makes it optional


def each(shapes: Mapping[str, Shape]) -> tuple[Requirement, ...]:
    """Every one of these tensors, on its own, with one shape."""
    return tuple(({name: (shape,)},) for name, shape in shapes.items())


def together(shapes: Mapping[str, Shape]) -> Group:
    """These tensors as one alternative, each with one shape."""
    return {name: (shape,) for name, shape in shapes.items()}


def attention_block_tensors(layer: LayerSpec, hidden: int) -> tuple[Requirement, ...]:
    """A block of a family whose layers all attend. Like all functions here, without the block's norms."""
    assert isinstance(layer.mixer, AttentionSpec)
    return (*attention_tensors(layer.mixer, hidden), *ffn_tensors(layer, hidden))


def hybrid_block_tensors(
    layer: LayerSpec, hidden: int, projections: Callable[[DeltaNetSpec, int], tuple[Requirement, ...]]
) -> tuple[Requirement, ...]:
    """A block with attention or a gated DeltaNet; `projections`: the input's, which differ by family."""
    mixer = (
        attention_tensors(layer.mixer, hidden)
        if isinstance(layer.mixer, AttentionSpec)
        else (*_delta_net_rule_tensors(layer.mixer, hidden), *projections(layer.mixer, hidden))
    )
    return (*mixer, *ffn_tensors(layer, hidden))


def delta_net_projections(spec: DeltaNetSpec, hidden: int) -> tuple[Requirement, ...]:
    """The projections of a gated DeltaNet's input, each a tensor of its own."""
    return each(
        {
            "attn_qkv.weight": (spec.conv_dim, hidden),
            "attn_gate.weight": (spec.value_dim, hidden),
            "ssm_alpha.weight": (spec.num_value_heads, hidden),
            "ssm_beta.weight": (spec.num_value_heads, hidden),
        }
    )


def norm_tensors(ffn_norm: str, hidden: int) -> tuple[Requirement, ...]:
    """The norms before the mixer and before the feed-forward network, which is named `ffn_norm`."""
    return each({"attn_norm.weight": (hidden,), f"{ffn_norm}.weight": (hidden,)})


def post_norm_tensors(layer: LayerSpec, hidden: int) -> tuple[Requirement, ...]:
    """The norms of what the mixer and the feed-forward network give, and the number of the layer."""
    names: list[str] = []
    if layer.post_norms:
        names += ["post_attention_norm.weight", "post_ffw_norm.weight"]
        if isinstance(layer.ffn, MoeSpec) and layer.ffn.shared == "parallel":
            names += ["post_ffw_norm_1.weight", "post_ffw_norm_2.weight"]
    scale: dict[str, Shape] = {OUTPUT_SCALE: (1,)} if layer.output_scale else {}
    return each(dict.fromkeys(names, (hidden,)) | scale)


def stream_tensors(spec: HyperConnectionSpec, hidden: int, *parts: str) -> tuple[Requirement, ...]:
    """What mixes the residual streams, of parts such as `hc_attn`, and lets their outputs enter."""
    width = spec.num_streams * hidden
    shapes: dict[str, Shape] = {}
    for part in parts:
        shapes |= {
            f"{part}_norm.weight": (width,),
            f"{part}_down.weight": (spec.rank, width),
            f"{part}_up.weight": (width, spec.rank),
            f"{part}_inject.weight": (spec.num_streams, width),
        }
    return each(shapes)


def mixer_tensors(spec: HyperConnectionSpec, hidden: int, part: str) -> tuple[Requirement, ...]:
    """`stream_tensors` of a part whose output enters no stream, as the one before the head."""
    return stream_tensors(spec, hidden, part)[:-1]


def indexer_tensors(spec: IndexerSpec, hidden: int) -> tuple[Requirement, ...]:
    """The projections and norms by which attention chooses blocks of positions."""
    return each(
        {
            "indexer.q_proj.weight": (spec.num_heads * spec.head_dim, hidden),
            "indexer.k_proj.weight": (spec.head_dim, hidden),
            "indexer.q_norm.weight": (spec.head_dim,),
            "indexer.k_norm.weight": (spec.head_dim,),
        }
    )


def ngram_tensors(spec: NgramSpec, streams: int, hidden: int) -> tuple[Requirement, ...]:
    """How n-grams enter the residual streams; the table itself belongs to no block."""
    width = streams * hidden
    return each(
        {
            "ple_key.weight": (width, spec.width),
            "ple_value.weight": (hidden, spec.width),
            "ple_norm_key.weight": (width,),
            "ple_norm_query.weight": (width,),
            "ple_norm_conv.weight": (width,),
            "ple_conv1d.weight": (width, spec.num_taps),
        }
    )


def ffn_tensors(layer: LayerSpec, hidden: int) -> tuple[Requirement, ...]:
    """The feed-forward network of a block."""
    if isinstance(layer.ffn, MoeSpec):
        return _moe_tensors(layer.ffn, hidden)
    return _dense_ffn_tensors(layer.ffn, hidden)


def attention_tensors(spec: AttentionSpec, hidden: int) -> tuple[Requirement, ...]:
    """Projections, fused or apart, gates that have their own, and the norms of queries and keys."""
    shapes = {"attn_q.weight": (spec.query_rows, hidden), "attn_k.weight": (spec.kv_dim, hidden)}
    if not spec.values_are_keys:
        shapes["attn_v.weight"] = (spec.kv_dim, hidden)
    split = together(shapes)
    fused = together({"attn_qkv.weight": (sum(rows for rows, _ in shapes.values()), hidden)})
    others: dict[str, Shape] = {"attn_output.weight": (hidden, spec.query_dim)}
    if spec.qk_norm == "head":
        others |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
    if spec.bias != "none":
        others |= {
            "attn_q.bias": (spec.query_dim,),
            "attn_k.bias": (spec.kv_dim,),
            "attn_v.bias": (spec.kv_dim,),
        }
    if spec.bias == "all":
        others["attn_output.bias"] = (hidden,)
    if spec.sinks:
        others["attn_sinks.weight"] = (spec.num_heads,)
    if spec.gate_rows:
        others["attn_gate.weight"] = (spec.gate_rows, hidden)
    return ((split, fused), *each(others))


def _delta_net_rule_tensors(spec: DeltaNetSpec, hidden: int) -> tuple[Requirement, ...]:
    """All but the projections of the input, whose layout differs by family."""
    heads = spec.num_value_heads
    bias: Requirement = ({"ssm_dt.bias": ((heads,),)}, {"ssm_dt": ((heads,),)})
    others = {
        "ssm_a": (heads,),
        "ssm_conv1d.weight": (spec.conv_dim, spec.conv_kernel),
        "ssm_norm.weight": (spec.state_size,),
        "ssm_out.weight": (hidden, spec.value_dim),
    }
    return (bias, *each(others))


def _dense_ffn_tensors(spec: DenseFfnSpec, hidden: int) -> tuple[Requirement, ...]:
    return each(
        {
            "ffn_gate.weight": (spec.size, hidden),
            "ffn_up.weight": (spec.size, hidden),
            "ffn_down.weight": (hidden, spec.size),
        }
    )


def _moe_tensors(spec: MoeSpec, hidden: int) -> tuple[Requirement, ...]:
    experts, size = spec.num_experts, spec.ffn_size
    split = together(
        {"ffn_gate_exps.weight": (experts, size, hidden), "ffn_up_exps.weight": (experts, size, hidden)}
    )
    fused = together(
        {"ffn_gate_up_exps.weight": (experts, 2 * size, hidden)}
    )  # per expert: rows of gate, then of up
    others = {
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_down_exps.weight": (experts, hidden, size),
        **({"ffn_gate_inp.bias": (experts,)} if spec.router.bias else {}),
        **({"exp_probs_b.bias": (experts,)} if spec.router.selection_bias else {}),
        **({"ffn_gate_inp.scale": (hidden,)} if spec.router.own_input else {}),
        **({"ffn_down_exps.scale": (experts,)} if spec.router.expert_scale else {}),
    }
    biases = {
        "ffn_gate_exps.bias": (experts, size),
        "ffn_up_exps.bias": (experts, size),
        "ffn_down_exps.bias": (experts, hidden),
    }
    return (
        (split, fused),
        *each({**others, **(biases if spec.bias else {})}),
        *_shared_expert_tensors(spec, hidden),
    )


def _shared_expert_tensors(spec: MoeSpec, hidden: int) -> tuple[Requirement, ...]:
    if spec.shared == "none":
        return ()
    size = spec.shared_ffn_size
    if spec.shared == "parallel":
        network = _dense_ffn_tensors(DenseFfnSpec(size, spec.activation), hidden)
        return (*network, *each({"ffn_norm.weight": (hidden,)}))
    gate: Group = {"ffn_gate_inp_shexp.weight": ((hidden,), (1, hidden))}
    others = {
        "ffn_gate_shexp.weight": (size, hidden),
        "ffn_up_shexp.weight": (size, hidden),
        "ffn_down_shexp.weight": (hidden, size),
    }
    return (*each(others), *([(gate,)] if spec.shared == "gated" else []))


def nextn_tensors(
    hidden: int, vocab_size: int, streams: HyperConnectionSpec | None = None
) -> tuple[Requirement, ...]:
    """Tensors of a block for multi-token prediction beside its layer; some may be the model's own."""
    table = (vocab_size, hidden)
    required = {
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": ((streams.num_streams if streams else 1) * hidden,),
    }
    own: dict[str, Shape] = {"nextn.embed_tokens.weight": table, "nextn.shared_head_head.weight": table}
    if streams is None:
        own["nextn.shared_head_norm.weight"] = (hidden,)
    head = mixer_tensors(streams, hidden, "nextn.hc_head") if streams else ()
    return (*each(required), *head, *((*requirement, {}) for requirement in each(own)))
