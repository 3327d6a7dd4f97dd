"""Changed specs of models."""

from dataclasses import replace
from typing import Any

from coldstream.models import ModelSpec
from coldstream.models.spec.layer_specs import LayerSpec


def with_layers(spec: ModelSpec, kind: type, **changes: Any) -> ModelSpec:
    """`spec` with other values for some fields of all its mixers or feed-forward networks of `kind`."""

    def changed(part: Any) -> Any:
        return replace(part, **changes) if isinstance(part, kind) else part

    def change(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(changed(layer.mixer), changed(layer.ffn)) for layer in layers)

    return replace(spec, layers=change(spec.layers), nextn_layers=change(spec.nextn_layers))
