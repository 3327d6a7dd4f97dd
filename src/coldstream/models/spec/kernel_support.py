"""Compares the layers of a file with what kernels compute.

A file that needs anything else is refused before a weight is read: without it, its text would be fluent and
wrong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coldstream.errors import UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.kernels.indexer.records import INDEXED_BLOCK_SIZES
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    LayerSpec,
    MoeSpec,
)


@dataclass(frozen=True)
class _LayerField:
    """One field of a layer: its value, whether kernels compute it, and what they compute."""

    what: str
    value: object
    is_supported: bool
    supported: str
    keys: tuple[str, ...] = ()  # one of them may state the value in the file


def check_kernels(layers: Sequence[LayerSpec], keys: Hyperparameters) -> None:
    """Raises UnsupportedError for the first field of `layers` whose value no kernel computes.

    The message names the key and its value in the file, or the layer and the value where no key says it.
    """
    for index, layer in enumerate(layers):
        for field in (*_mixer_fields(layer.mixer), *_ffn_fields(layer.ffn), *_norm_fields(layer)):
            if field.is_supported:
                continue
            for key in field.keys:
                if key in keys:
                    problem = f"{keys.value(key)}, supported: {field.supported}"
                    raise keys.error(UnsupportedError, key, problem)
            raise UnsupportedError(
                f"{shorten(keys.path)}: blk.{index} of {keys.architecture}: {field.what} {field.value}, "
                f"supported: {field.supported}"
            )
    _check_alike(layers, keys)


def _mixer_fields(spec: AttentionSpec | DeltaNetSpec) -> Iterator[_LayerField]:
    if isinstance(spec, DeltaNetSpec):
        return
    of_heads = spec.qk_norm in ("none", "head")
    yield _LayerField("q/k norm", spec.qk_norm, of_heads, "none, or a norm of each head")
    # A gate that comes with each query would have a bias between those of queries.
    is_plain = spec.output_gate != "query" and not spec.values_are_keys
    has_biases = spec.bias == "none" or is_plain
    yield _LayerField("bias", spec.bias, has_biases, "none beside gates in the projection of queries")
    if spec.indexer is not None:
        size, width = spec.indexer.block_size, spec.indexer.head_dim
        has_kernel = size == 0 or size in INDEXED_BLOCK_SIZES  # 0: texts end before one is needed
        supported = f"blocks of {', '.join(map(str, INDEXED_BLOCK_SIZES))} positions"
        yield _LayerField("indexer's blocks", size, has_kernel, supported, ("attention.compress_ratios",))
        turns, supported = spec.rope.num_dims, f"at least the {spec.rope.num_dims} dimensions that turn"
        yield _LayerField(
            "indexer's heads", width, width >= turns, supported, ("attention.indexer.key_length",)
        )
    yield _LayerField("causal", spec.causal, spec.causal, "causal attention", ("attention.causal",))


def _ffn_fields(spec: MoeSpec | DenseFfnSpec) -> Iterator[_LayerField]:
    if isinstance(spec, DenseFfnSpec):
        return
    is_usual = spec.activation.kind == "swiglu" or spec.shared != "none"
    supported = "biases before another unit than SwiGLU, without a shared expert"
    yield _LayerField("expert bias", spec.bias, not (spec.bias and is_usual), supported)
    own = spec.router.own_input
    is_alone = not own or spec.shared != "gated"
    yield _LayerField("router's own input", own, is_alone, "one without the gate of a shared expert")


def _norm_fields(layer: LayerSpec) -> Iterator[_LayerField]:
    shared = layer.ffn.shared if isinstance(layer.ffn, MoeSpec) else "none"
    is_one_stream = layer.hyper_connections is None
    supported = "one residual stream, and a shared expert that is normed, or none"
    of_parts = layer.post_norms and is_one_stream and shared in ("none", "parallel")
    yield _LayerField("norms of outputs", layer.post_norms, of_parts or not layer.post_norms, supported)
    is_normed = layer.post_norms or (shared != "parallel" and not layer.output_scale)
    supported = "outputs that are normed"
    yield _LayerField("parallel network or scale", shared, is_normed, supported)
    has_biases = isinstance(layer.ffn, MoeSpec) and layer.ffn.bias
    is_added = not has_biases or (is_one_stream and not layer.post_norms)
    supported = "biases before one residual stream, and no norms of outputs"
    yield _LayerField("expert bias", has_biases, is_added, supported)
    is_mixed = layer.ngram is None or not is_one_stream
    yield _LayerField("n-grams", layer.ngram, is_mixed, "n-grams before hyper-connected layers")


def _check_alike(layers: Sequence[LayerSpec], keys: Hyperparameters) -> None:
    """Recurrent states and slots of experts have one size for all layers. Attention may differ by layer."""
    names = ("gated DeltaNet", "mixture-of-experts", "dense feed-forward", "hyper-connected")
    kinds: dict[str, set[object]] = {name: set() for name in names}
    for layer in layers:
        kinds["hyper-connected"].add(layer.hyper_connections)
        if isinstance(layer.mixer, DeltaNetSpec):
            kinds["gated DeltaNet"].add(layer.mixer)
        kinds["mixture-of-experts" if isinstance(layer.ffn, MoeSpec) else "dense feed-forward"].add(layer.ffn)
    for what, specs in kinds.items():
        if len(specs) > 1:
            raise UnsupportedError(
                f"{shorten(keys.path)}: the {what} layers of {keys.architecture} differ from each other, "
                "supported: layers that are alike"
            )
