"""Families for tests, whose files may have layers without experts, and shared experts without a gate."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import pytest

from coldstream.models import architectures, loader
from coldstream.models.architectures import Architecture, tensor_table
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import read_dense_ffn
from coldstream.models.spec.layer_specs import LayerSpec, MoeSpec

DENSE_KEY = "feed_forward_length"  # of layers without experts, which `make_model` leaves to its caller


@contextmanager
def mixed_families() -> Iterator[None]:
    """Families with experts open such files meanwhile: which layers these are, their tensors say."""
    families = {name: _mixed(family) for name, family in architectures.ARCHITECTURES.items()}
    with pytest.MonkeyPatch.context() as patch:
        for module in (architectures, loader, tensor_table):
            patch.setattr(module, "ARCHITECTURES", MappingProxyType(families))
        yield


def _mixed(family: Architecture) -> Architecture:
    def read_layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
        layers = enumerate(family.read_layers(keys))
        return tuple(_as_in_file(keys, f"blk.{index}.", layer) for index, layer in layers)

    return replace(family, read_layers=read_layers)


def _as_in_file(keys: Hyperparameters, block: str, layer: LayerSpec) -> LayerSpec:
    names = keys.tensors
    if not isinstance(layer.ffn, MoeSpec):
        return layer
    if f"{block}ffn_gate.weight" in names:
        return replace(layer, ffn=read_dense_ffn(keys))
    if f"{block}ffn_gate_shexp.weight" not in names or f"{block}ffn_gate_inp_shexp.weight" in names:
        return layer
    size = keys.uniform("expert_shared_feed_forward_length", 1 << 16)
    return replace(layer, ffn=replace(layer.ffn, shared="plain", shared_ffn_size=size))
