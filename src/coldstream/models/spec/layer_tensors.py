"""The tensors of the parts of a layer, by the names that families share, with their shapes.

Shapes are in numpy order: a weight is [out, in], a stack of experts [experts, out, in]. What converters do
differently is written as alternatives: fused or split matrices, a shape with or without a leading 1, a name
with or without `.bias`.
"""

from collections.abc import Callable, Mapping

from coldstream.models.spec.layer_specs import AttentionSpec, DeltaNetSpec, DenseFfnSpec, LayerSpec, MoeSpec

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


def hybrid_block_tensors(
    layer: LayerSpec, hidden: int, projections: Callable[[DeltaNetSpec, int], tuple[Requirement, ...]]
) -> tuple[Requirement, ...]:
    """A block with attention or a gated DeltaNet; `projections`: the input's, which differ by family.

    Like all functions here, without the block's norms.
    """
    mixer = (
        attention_tensors(layer.mixer, hidden)
        if isinstance(layer.mixer, AttentionSpec)
        else (*_delta_net_rule_tensors(layer.mixer, hidden), *projections(layer.mixer, hidden))
    )
    return (*mixer, *ffn_tensors(layer, hidden))


def norm_tensors(ffn_norm: str, hidden: int) -> tuple[Requirement, ...]:
    """The norms before the mixer and before the feed-forward network, which is named `ffn_norm`."""
    return each({"attn_norm.weight": (hidden,), f"{ffn_norm}.weight": (hidden,)})


def ffn_tensors(layer: LayerSpec, hidden: int) -> tuple[Requirement, ...]:
    """The feed-forward network of a block."""
    if isinstance(layer.ffn, MoeSpec):
        return _moe_tensors(layer.ffn, hidden)
    return _dense_ffn_tensors(layer.ffn, hidden)


def attention_tensors(spec: AttentionSpec, hidden: int) -> tuple[Requirement, ...]:
    """Projections, fused or apart, gates that have their own, and the norms of queries and keys."""
    split = together(
        {
            "attn_q.weight": (spec.query_rows, hidden),
            "attn_k.weight": (spec.kv_dim, hidden),
            "attn_v.weight": (spec.kv_dim, hidden),
        }
    )
    fused = together({"attn_qkv.weight": (spec.query_rows + 2 * spec.kv_dim, hidden)})
    others = {
        "attn_output.weight": (hidden, spec.query_dim),
        "attn_q_norm.weight": (spec.head_dim,),
        "attn_k_norm.weight": (spec.head_dim,),
    }
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
    }
    return ((split, fused), *each(others), *_shared_expert_tensors(spec, hidden))


def _shared_expert_tensors(spec: MoeSpec, hidden: int) -> tuple[Requirement, ...]:
    if spec.shared == "none":
        return ()
    size = spec.shared_ffn_size
    gate: Group = {"ffn_gate_inp_shexp.weight": ((hidden,), (1, hidden))}
    others = {
        "ffn_gate_shexp.weight": (size, hidden),
        "ffn_up_shexp.weight": (size, hidden),
        "ffn_down_shexp.weight": (hidden, size),
    }
    return (*each(others), *([(gate,)] if spec.shared == "gated" else []))


def nextn_tensors(hidden: int, vocab_size: int) -> tuple[Requirement, ...]:
    """Tensors of a block for multi-token prediction beside its layer; some may be the model's own."""
    table = (vocab_size, hidden)
    required = {
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (hidden,),
    }
    own = {
        "nextn.shared_head_norm.weight": (hidden,),
        "nextn.embed_tokens.weight": table,
        "nextn.shared_head_head.weight": table,
    }
    return (*each(required), *((*requirement, {}) for requirement in each(own)))
