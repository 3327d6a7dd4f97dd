"""Every property of a layer that no kernel computes is refused, with its value."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from builders import SMALL, make_model, write_model
from coldstream.errors import UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.indexer.records import INDEXED_BLOCK_SIZES
from coldstream.kernels.ops import Activation, NgramHash, RouterSpec
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.kernel_support import check_kernels
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
from coldstream.models.spec.model_spec import ModelSpec
from specs import with_layers

Opened = tuple[ModelSpec, Hyperparameters]

# Every field that is a choice and not a size, with a value that no kernel computes.
CHOICES: list[tuple[type, dict[str, Any], str]] = [
    (AttentionSpec, {"qk_norm": "projection"}, "q/k norm projection, supported: none, or a norm of each"),
    (AttentionSpec, {"bias": "all"}, "bias all, supported: none beside gates in the projection of queries"),
    (AttentionSpec, {"causal": False}, "causal False, supported: causal attention"),
    (AttentionSpec, {"indexer": IndexerSpec(2, 8, 64, 12)}, "indexer's blocks 12, supported: blocks of 4, 8"),
    (AttentionSpec, {"indexer": IndexerSpec(2, 3, 64, 4)}, "indexer's heads 3, supported: at least the 4"),
    (MoeSpec, {"bias": True}, "expert bias True, supported: biases before another unit than SwiGLU"),
    (MoeSpec, {"bias": True, "activation": Activation("geglu")}, "expert bias True"),
    (
        MoeSpec,
        {"shared": "parallel"},
        "parallel network or scale parallel, supported: outputs that are normed",
    ),
    (MoeSpec, {"router": RouterSpec(own_input=True)}, "router's own input True, supported: one without"),
]
# Likewise, with values that kernels compute besides those of the model below.
COMPUTED: list[tuple[type, dict[str, Any]]] = [
    (AttentionSpec, {"qk_norm": "none"}),
    (AttentionSpec, {"scale": 0.5}),
    (AttentionSpec, {"v_norm": True}),
    (AttentionSpec, {"rope_factors": True}),
    (AttentionSpec, {"bias": "all", "output_gate": "none"}),
    (AttentionSpec, {"sinks": True}),
    (AttentionSpec, {"values_are_keys": True}),
    *((AttentionSpec, {"output_gate": gate}) for gate in ("none", "head", "element")),
    (AttentionSpec, {"window": 128}),
    *((AttentionSpec, {"indexer": IndexerSpec(2, 8, 64, size)}) for size in (0, *INDEXED_BLOCK_SIZES)),
    (MoeSpec, {"shared": "none"}),
    (MoeSpec, {"shared": "plain"}),
    (MoeSpec, {"activation": Activation("geglu")}),
    (MoeSpec, {"activation": Activation("clamped swiglu", 7.0), "bias": True, "shared": "none"}),
]
SIZES = {
    AttentionSpec: {"num_heads", "num_kv_heads", "head_dim", "rope"},
    MoeSpec: {"num_experts", "num_experts_per_tok", "ffn_size", "shared_ffn_size"},
}


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """A sound model and its keys."""
    path = write_model(tmp_path / "tiny.gguf", make_model(dims=SMALL, quant="F32", tokenizer=False))[0]
    with GGUFFile.open(path) as file:
        keys = Hyperparameters(file.metadata, file.tensors, "qwen35moe")
        return read_spec(file.metadata, file.tensors), keys


@pytest.mark.parametrize(("kind", "changes", "message"), CHOICES, ids=lambda value: str(value)[:60])
def test_what_no_kernel_computes(opened: Opened, kind: type, changes: dict[str, Any], message: str) -> None:
    spec, keys = opened
    check_kernels(spec.layers, keys)
    with pytest.raises(UnsupportedError, match=rf"tiny\.gguf: blk\.[03] of qwen35moe: .*{message}"):
        check_kernels(with_layers(spec, kind, **changes).layers, keys)


@pytest.mark.parametrize(("kind", "changes"), COMPUTED, ids=str)
def test_what_kernels_compute(opened: Opened, kind: type, changes: dict[str, Any]) -> None:
    spec, keys = opened
    other = with_layers(spec, kind, **changes)
    check_kernels(other.layers, keys)


def test_every_choice_is_in_the_lists_above() -> None:
    """Every new field of a spec must be listed as a size or as a choice."""
    choices = (*((kind, changes) for kind, changes, _ in CHOICES), *COMPUTED)
    tried = {(kind, name) for kind, changes in choices for name in changes}
    for kind, sizes in SIZES.items():
        assert {field.name for field in fields(kind)} - sizes == {name for k, name in tried if k is kind}


def test_norms_of_outputs(opened: Opened) -> None:
    """They come with one residual stream, and with a shared expert that is normed, too."""
    spec, keys = opened

    def check(shared: str, **changes: Any) -> None:
        layers = with_layers(spec, MoeSpec, shared=shared).layers
        check_kernels(tuple(replace(layer, **changes) for layer in layers), keys)

    for shared in ("none", "parallel"):
        check(shared, post_norms=True, output_scale=True)
    with pytest.raises(UnsupportedError, match="norms of outputs True, supported: one residual stream"):
        check("plain", post_norms=True)
    with pytest.raises(UnsupportedError, match="norms of outputs True, supported: one residual stream"):
        check("none", post_norms=True, hyper_connections=HyperConnectionSpec(4, 16))
    with pytest.raises(UnsupportedError, match="supported: outputs that are normed"):
        check("none", output_scale=True)


def test_biases_of_experts_and_ngrams_want_the_streams_that_their_kernels_write(opened: Opened) -> None:
    """Kernels add biases to one residual stream without norms of outputs, and n-grams to several."""
    spec, keys = opened
    unit = {"activation": Activation("clamped swiglu", 7.0), "shared": "none"}
    hashing = NgramHash((3, 5, 7), (11, 13), (0, 11), 2, 1)
    streams, ngram = HyperConnectionSpec(4, 16), NgramSpec(hashing, 8, 0, 4)

    def check(bias: bool, **changes: Any) -> None:
        layers = with_layers(spec, MoeSpec, bias=bias, **unit).layers
        check_kernels(tuple(replace(layer, **changes) for layer in layers), keys)

    check(True)
    check(False, post_norms=True)
    check(False, hyper_connections=streams, ngram=ngram)
    one_stream = "expert bias True, supported: biases before one residual stream, and no norms of outputs"
    for changes in ({"hyper_connections": streams}, {"post_norms": True}):
        with pytest.raises(UnsupportedError, match=one_stream):
            check(True, **changes)
    with pytest.raises(
        UnsupportedError, match=r"n-grams NgramSpec.*, supported: n-grams before hyper-connected"
    ):
        check(False, ngram=ngram)


def test_layers_of_a_kind_are_alike_but_for_attention(opened: Opened) -> None:
    spec, keys = opened
    first, *others, last = spec.layers
    assert isinstance(first.mixer, DeltaNetSpec)
    assert isinstance(last.mixer, AttentionSpec)
    assert isinstance(last.ffn, MoeSpec)
    check_kernels((first, *others, last, LayerSpec(replace(last.mixer, num_heads=8), last.ffn)), keys)
    grouped = LayerSpec(replace(first.mixer, value_heads_grouped=True), first.ffn)
    narrow = LayerSpec(first.mixer, replace(last.ffn, ffn_size=8))
    dense, smaller = (LayerSpec(first.mixer, DenseFfnSpec(size)) for size in (64, 32))
    check_kernels((dense, dense, *others[1:], last), keys)
    streams = replace(first, hyper_connections=HyperConnectionSpec(4, 16))
    for layers, what in {
        (grouped, *others, last): "gated DeltaNet",
        (narrow, *others, last): "mixture-of-experts",
        (dense, smaller, *others[1:], last): "dense feed-forward",
        (streams, *others, last): "hyper-connected",
    }.items():
        with pytest.raises(UnsupportedError, match=rf"tiny\.gguf: the {what} layers of qwen35moe differ"):
            check_kernels(layers, keys)
