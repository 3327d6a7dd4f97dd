"""The mixture-of-experts FFN: a router, routed experts, and perhaps a shared one, gated or not."""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, ExpertOutputs, ExpertWeights, Ops, RouterWeights


@dataclass(frozen=True)
class MoeWeights:
    """A router and the experts that it chooses from."""

    router: RouterWeights
    experts: ExpertWeights


def moe(ops: Ops, x: Array, weights: MoeWeights, residual: Array = None) -> ExpertOutputs:
    """Every chosen expert's output for x [T, E], which `Ops.add_norm` sums into the residual stream.

    residual: the residual stream that x is a norm of, for routers that read a norm of their own.
    """
    routing = ops.router(x, weights.router, weights.experts, residual)
    return ops.experts(x, routing, weights.experts)
