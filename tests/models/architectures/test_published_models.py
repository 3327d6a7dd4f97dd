"""Models by name: the numbers in the headers of published files are read as what these models are.

`published_models.json` has them as converters write them, with the parameters in billions that llama.cpp
shows. Names are the file's own: nothing depends on them.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldstream.engine.opened_model import sampling_defaults
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import TensorInfo
from coldstream.models import ModelSpec, block_tensors, global_tensors, read_spec
from coldstream.models.spec.layer_specs import AttentionSpec, DeltaNetSpec, MoeSpec

MODELS = json.loads((Path(__file__).parent / "published_models.json").read_text())
every_model = pytest.mark.parametrize("model", MODELS, ids=[model["name"] for model in MODELS])


def metadata_of(model: dict[str, Any]) -> dict[str, Any]:
    keys = {
        name: np.array(value, np.int32) if isinstance(value, list) else value
        for name, value in model["keys"].items()
    }
    return {
        "general.architecture": model["architecture"],
        "general.name": model["name"],
        "general.basename": model["basename"],
        "general.size_label": model["size_label"],
        **{f"general.sampling.{name}": value for name, value in model["sampling"].items()},
        **{f"{model['architecture']}.{name}": value for name, value in keys.items()},
    }


def spec_of(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """The spec, with the tensors taken as they ought to be: `num_parameters` counts those."""
    monkeypatch.setattr(sys.modules["coldstream.models.read_spec"], "validate_tensors", lambda *_: ())
    keys = model["keys"]
    tables = dict.fromkeys(
        ("token_embd.weight", "output.weight"), (model["vocabulary"], keys["embedding_length"])
    )
    num_nextn = keys.get("nextn_predict_layers", 0)
    num_layers = keys["block_count"] - num_nextn
    of_blocks = [f"blk.{block}.nextn.eh_proj.weight" for block in range(num_layers, num_layers + num_nextn)]
    if model["architecture"] != "qwen3moe":
        of_blocks += [f"blk.{block}.ssm_a" for block in range(num_layers) if block % 4 != 3]
    shapes = tables | dict.fromkeys(("blk.0.attn_norm.weight", *of_blocks), (1,))
    tensors = {name: TensorInfo(name, shape, QuantType.F32, 0, 0, 0) for name, shape in shapes.items()}
    return read_spec(metadata_of(model), tensors)


def num_parameters(spec: ModelSpec) -> int:
    """Of the trunk."""
    blocks = [requirement for block in range(spec.num_layers) for requirement in block_tensors(spec, block)]
    return sum(
        math.prod(shapes[0])
        for requirement in (*global_tensors(spec), *blocks)
        for shapes in requirement[0].values()
    )


@every_model
def test_the_parameters_are_as_many_as_published(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(model, monkeypatch)
    assert round(num_parameters(spec) / 1e9, 2) == model["parameters"]
    assert len(spec.nextn_layers) == model["keys"].get("nextn_predict_layers", 0)
    assert spec.context_length == 262_144


@every_model
def test_layers_and_experts_are_those_of_the_model(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(model, monkeypatch)
    is_hybrid = model["architecture"] != "qwen3moe"
    for index, layer in enumerate(spec.layers):
        is_attention = not is_hybrid or index % 4 == 3
        assert isinstance(layer.mixer, AttentionSpec if is_attention else DeltaNetSpec)
    if model["architecture"] == "qwen35":
        assert not spec.is_moe
        return
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, MoeSpec)
    keys = model["keys"]
    assert (ffn.num_experts, ffn.num_experts_per_tok) == (keys["expert_count"], keys["expert_used_count"])
    assert (ffn.shared == "none") == (not keys["expert_shared_feed_forward_length"])


@every_model
def test_recommended_sampling_is_the_default(model: dict[str, Any]) -> None:
    found = sampling_defaults(metadata_of(model))
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    for name, value in model["sampling"].items():
        assert getattr(found, names.get(name, name)) == value
