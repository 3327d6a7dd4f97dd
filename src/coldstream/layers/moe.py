"""The mixture-of-experts FFN: a router, routed experts, and perhaps a shared one behind a scalar gate."""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, ExpertOutputs, ExpertWeights, Ops, Weight


@dataclass(frozen=True)
class MoeWeights:
    """ffn_gate_inp is the router and ffn_gate_inp_shexp the shared expert's gate, as named in the file."""

    ffn_gate_inp: Weight  # [experts, E]
    ffn_gate_inp_shexp: Weight  # [1, E]; None without a shared expert
    experts: ExpertWeights
    num_experts_per_tok: int


def moe(ops: Ops, x: Array, weights: MoeWeights) -> ExpertOutputs:
    """Every chosen expert's output for x [T, E], which `Ops.add_norm` sums into the residual stream."""
    routing = ops.router(
        x, weights.ffn_gate_inp, weights.ffn_gate_inp_shexp, weights.num_experts_per_tok, weights.experts
    )
    return ops.experts(x, routing, weights.experts)
