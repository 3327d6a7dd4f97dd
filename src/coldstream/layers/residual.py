"""What blocks read and add to: one residual stream with norms, or several with mixtures of them."""

from coldstream.kernels.linear.records import BiasedOutput
from coldstream.kernels.ops import Array, ExpertOutputs, Ops, PostNorms
from coldstream.layers.hyper_connections import (
    EnteringStreams,
    HyperConnectionWeights,
    Streams,
    enter_streams,
    update_streams,
)
from coldstream.layers.ngram import NgramInputs, NgramMixture, add_ngrams

# The weights of a norm [E], or of a mixture in its place, maybe with n-grams before it.
Norm = Array | HyperConnectionWeights | NgramMixture
Residual = Array | Streams
Entering = Array | EnteringStreams  # what enters the first block: [T, E], or several streams


def enter(ops: Ops, x: Entering, norm: Norm, eps: float) -> tuple[Residual, Array]:
    """The residual stream of what enters the first block, and what its first part reads, [T, E]."""
    if isinstance(norm, HyperConnectionWeights):
        return enter_streams(ops, x, norm, eps)
    return x, ops.rms_norm(x, norm, eps)


def update(
    ops: Ops,
    residual: Residual,
    output: Array | ExpertOutputs | BiasedOutput,
    norm: Norm,
    eps: float,
    *,
    post: PostNorms | None = None,
    for_router: bool = False,
    ngrams: NgramInputs | None = None,
) -> tuple[Residual, Array]:
    """The residual stream after the output of a part, and what the next part reads of it, [T, E].

    post: norms of the output, for one residual stream. for_router: as in `Ops.add_norm`. ngrams: of the step,
    for a norm that has some before it.
    """
    is_plain = post is None and not isinstance(norm, NgramMixture | HyperConnectionWeights)
    if isinstance(output, BiasedOutput) and not is_plain:
        output = ops.add_bias(output.values, output.bias)
    if post is not None:
        return ops.add_post_norm(residual, output, post, norm, eps)
    if isinstance(norm, NgramMixture):
        assert isinstance(residual, Streams)
        assert ngrams is not None, "a model with n-grams finds them first"
        return add_ngrams(ops, residual, output, norm, ngrams, eps)
    if isinstance(norm, HyperConnectionWeights):
        return update_streams(ops, residual, output, norm, eps)
    return ops.add_norm(residual, output, norm, eps, for_router=for_router)


def values_of(residual: Residual) -> Array:
    """One stream [T, E], or several side by side, [T, C·E]."""
    return residual.values if isinstance(residual, Streams) else residual
