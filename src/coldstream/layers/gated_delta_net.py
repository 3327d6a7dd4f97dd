"""The gated DeltaNet mixer, from normed hidden states to what is added to the residual stream.

In two parts, as attention is.
"""

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


def project_gated_delta_net(ops: Ops, x: Array, weights: GatedDeltaNetWeights, rows: Rows) -> DeltaNetInputs:
    """The inputs of `gated_delta_net` for x [T, E]."""
    projections = (weights.attn_qkv, weights.attn_gate, weights.ssm_alpha, weights.ssm_beta)
    qkv, z, alpha, beta = ops.linear(x, projections)
    return DeltaNetInputs(qkv, z, alpha, beta, rows)


def gated_delta_net(
    ops: Ops, inputs: DeltaNetInputs, weights: GatedDeltaNetWeights, conv_state: Array, state: Array
) -> Array:
    """→ [T, E]. Advances both states over the rows of `inputs`; shapes as in `Ops.gated_delta_net`."""
    mixed = ops.gated_delta_net(inputs, weights.rule, conv_state, state)
    return ops.linear(mixed, (weights.ssm_out,))[0]
