"""The mixture-of-experts FFN: a router, routed experts, and one shared expert behind a scalar gate."""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, Ops, Weight


@dataclass(frozen=True)
class MoeWeights:
    """Named as in the file; `exps` are the routed experts, `shexp` is the shared one, of its own FFN size."""

    ffn_gate_inp: Weight  # [experts, E], the router
    ffn_gate_exps: Weight  # [experts, F, E]
    ffn_up_exps: Weight  # [experts, F, E]
    ffn_down_exps: Weight  # [experts, E, F]
    ffn_gate_inp_shexp: Weight  # [1, E]
    ffn_gate_shexp: Weight  # [F, E]
    ffn_up_shexp: Weight  # [F, E]
    ffn_down_shexp: Weight  # [E, F]
    num_experts_per_tok: int


def moe(ops: Ops, x: Array, weights: MoeWeights) -> Array:
    """Σ_k weight_k · expert_k(x) + sigmoid(shared gate) · shared(x): [T, E] → [T, E]."""
    topk_ids, topk_weights = ops.router(x, weights.ffn_gate_inp, weights.num_experts_per_tok)
    routed = ops.routed_experts(
        x, topk_ids, weights.ffn_gate_exps, weights.ffn_up_exps, weights.ffn_down_exps
    )
    gate, up, shared_gate = ops.linear(
        x, (weights.ffn_gate_shexp, weights.ffn_up_shexp, weights.ffn_gate_inp_shexp)
    )
    (shared,) = ops.linear(ops.swiglu(gate, up), (weights.ffn_down_shexp,))
    return ops.combine_experts(routed, topk_weights, shared, shared_gate)
