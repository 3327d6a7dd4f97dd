"""The mixture-of-experts FFN: a router, routed experts, and perhaps one for all tokens beside them."""

from dataclasses import dataclass, replace

from coldstream.kernels.ops import Array, ExpertOutputs, ExpertWeights, FfnWeights, Ops, RouterWeights


@dataclass(frozen=True)
class ParallelFfn:
    """A dense network beside the experts, which reads a norm of its own of the residual stream."""

    norm: Array  # [E]
    eps: float
    ffn: FfnWeights  # which `Ops.linear` can read


@dataclass(frozen=True)
class MoeWeights:
    """A router and the experts that it chooses from."""

    router: RouterWeights
    experts: ExpertWeights
    parallel: ParallelFfn | None = None  # in place of a shared expert


def moe(ops: Ops, x: Array, weights: MoeWeights, residual: Array = None) -> ExpertOutputs:
    """Every chosen expert's output for x [T, E], which `Ops.add_norm` sums into the residual stream.

    residual: the residual stream that x is a norm of, for routers and networks that read a norm of their own.
    """
    routing = ops.router(x, weights.router, weights.experts, residual)
    if weights.parallel is None:
        return ops.experts(x, routing, weights.experts)
    # Before the experts, so that a processor which computes some of them has begun, and nobody waits yet.
    beside = _beside(ops, residual, weights.parallel)
    return replace(ops.experts(x, routing, weights.experts), shared=beside)


def _beside(ops: Ops, residual: Array, parallel: ParallelFfn) -> Array:
    """[T, E]."""
    normed = ops.rms_norm(residual, parallel.norm, parallel.eps)
    gate, up = ops.linear(normed, (parallel.ffn.gate, parallel.ffn.up))
    return ops.linear(ops.glu(gate, up, parallel.ffn.activation), (parallel.ffn.down,))[0]
