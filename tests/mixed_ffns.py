"""Families for tests, whose files may have dense layers, ungated shared experts, other units and biases."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import pytest

from coldstream.kernels.ops import SWIGLU, Activation
from coldstream.models import architectures, loader
from coldstream.models.architectures import Architecture, tensor_table
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import read_dense_ffn
from coldstream.models.spec.layer_specs import LayerSpec, MoeSpec

UNITS = {unit.kind: unit for unit in (SWIGLU, Activation("clamped swiglu", 1.5), Activation("geglu"))}
UNIT_KEY = "hidden_activation"  # the kind of all gated units
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
    names, unit = keys.tensors, UNITS[keys.text(UNIT_KEY, "swiglu")]
    if not isinstance(layer.ffn, MoeSpec):
        return layer
    if f"{block}ffn_gate.weight" in names:
        return replace(layer, ffn=read_dense_ffn(keys, unit))
    ffn = replace(layer.ffn, activation=unit, bias=f"{block}ffn_gate_exps.bias" in names)
    if f"{block}ffn_gate_shexp.weight" in names and f"{block}ffn_gate_inp_shexp.weight" not in names:
        size = keys.uniform("expert_shared_feed_forward_length", 1 << 16)
        ffn = replace(ffn, shared="plain", shared_ffn_size=size)
    return replace(layer, ffn=ffn)
