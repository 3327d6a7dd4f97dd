"""The gated DeltaNet mixer, from normed hidden states to what is added to the residual stream."""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, DeltaNetInputs, DeltaNetWeights, Ops, Rows, Weight


@dataclass(frozen=True)
class GatedDeltaNetWeights:
    """Projections, named as in the file, and the small tensors of the rule itself."""

    attn_qkv: Weight  # [C, E]
    attn_gate: Weight  # [NV · d, E]
    ssm_alpha: Weight  # [NV, E]
    ssm_beta: Weight  # [NV, E]
    ssm_out: Weight  # [E, NV · d]
    rule: DeltaNetWeights


def gated_delta_net(
    ops: Ops,
    x: Array,
    weights: GatedDeltaNetWeights,
    conv_state: Array,
    state: Array,
    rows: Rows,
) -> Array:
    """x [T, E] → [T, E]. Advances both states over `rows`; shapes as in `Ops.gated_delta_net`."""
    projections = (weights.attn_qkv, weights.attn_gate, weights.ssm_alpha, weights.ssm_beta)
    qkv, z, alpha, beta = ops.linear(x, projections)
    inputs = DeltaNetInputs(qkv, z, alpha, beta, rows)
    mixed = ops.gated_delta_net(inputs, weights.rule, conv_state, state)
    return ops.linear(mixed, (weights.ssm_out,))[0]
