"""The router of a file: what keys state, what they may not, and the vectors that come with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import SMALL, make_model, write_model
from coldstream.errors import InconsistentError, ModelFormatError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import RouterSpec, RouterWeights
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.models.architectures.tensor_table import validate_tensors
from coldstream.models.loader import Loader
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import read_moe, read_router
from coldstream.models.spec.layer_specs import MoeSpec
from coldstream.models.spec.layer_tensors import ffn_tensors
from coldstream.models.spec.sanity import check_small_tensors
from specs import with_layers

LAGUNA = RouterSpec("sigmoid", selection_bias=True)
EXPERTS = 16
Keys = Callable[[dict[str, Any]], Hyperparameters]


@pytest.fixture
def keys_of(tmp_path: Path) -> Keys:
    def read(changes: dict[str, Any]) -> Hyperparameters:
        dims = replace(SMALL, experts=EXPERTS)
        model = make_model("qwen3moe", dims=dims, quant="F32", tokenizer=False)
        model.metadata |= {f"qwen3moe.{key}": value for key, value in changes.items()}
        with GGUFFile.open(write_model(tmp_path / "tiny.gguf", model)[0]) as file:
            return Hyperparameters(file.metadata, file.tensors, "qwen3moe")

    return read


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, LAGUNA),
        ({"expert_gating_func": 1}, replace(LAGUNA, gating="softmax")),
        ({"expert_gating_func": 3}, replace(LAGUNA, gating="softmax of the chosen")),
        ({"expert_gating_func": 4}, replace(LAGUNA, gating="square root of softplus")),
        ({"expert_weights_norm": False}, replace(LAGUNA, normalised=False)),
        ({"expert_weights_scale": 2.5}, replace(LAGUNA, scale=2.5)),
        ({"expert_weights_scale": 0.0}, LAGUNA),
        (
            {"expert_group_count": 4, "expert_group_used_count": 2},
            replace(LAGUNA, num_groups=4, num_used_groups=2),
        ),
        ({"expert_group_count": 4, "expert_group_used_count": 4}, LAGUNA),
        ({"expert_group_count": 1, "expert_group_used_count": 1}, LAGUNA),
    ],
)
def test_keys_are_followed(keys_of: Keys, changes: dict[str, Any], expected: RouterSpec) -> None:
    keys = keys_of(changes)
    assert read_router(keys, LAGUNA, is_fixed=False) == expected
    assert read_moe(keys, shared="none", router=expected).router == expected


def test_a_family_may_have_weights_that_are_not_normalised(keys_of: Keys) -> None:
    qwen2moe = RouterSpec(normalised=False)
    assert read_router(keys_of({}), qwen2moe) == qwen2moe
    with pytest.raises(
        UnsupportedError, match=r"expert_weights_norm.* supported: expert weights as they are"
    ):
        read_router(keys_of({"expert_weights_norm": True}), qwen2moe)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"expert_gating_func": 5}, UnsupportedError, "expert_gating_func.* 5, known: 1 to 4"),
        ({"expert_group_count": 4}, InconsistentError, "expert_group_used_count"),
        (
            {"expert_group_count": 4, "expert_group_used_count": 5},
            ModelFormatError,
            "expert_group_used_count",
        ),
        (
            {"expert_group_count": 4, "expert_group_used_count": 0},
            ModelFormatError,
            "expert_group_used_count",
        ),
        (
            {"expert_group_count": 3, "expert_group_used_count": 2},
            InconsistentError,
            "3 groups of 16 experts, expected equal ones",
        ),
        (
            {"expert_group_count": 16, "expert_group_used_count": 2},
            InconsistentError,
            "16 groups of 16 experts, expected equal ones of at least 2",
        ),
        (
            {"expert_group_count": 8, "expert_group_used_count": 1, "expert_used_count": 3},
            ModelFormatError,
            "expert_used_count",
        ),
    ],
)
def test_what_keys_may_not_state(
    keys_of: Keys, changes: dict[str, Any], kind: type[ModelFormatError], message: str
) -> None:
    keys = keys_of(changes)
    with pytest.raises(kind, match=message):
        read_moe(keys, shared="none", router=read_router(keys, LAGUNA, is_fixed=False))


def load_router(tmp_path: Path, router: RouterSpec, vectors: dict[str, np.ndarray]) -> RouterWeights:
    """That of the first layer of a model which has `vectors` too."""
    plain = make_model("qwen3moe", dims=SMALL, quant="F32", tokenizer=False)
    with GGUFFile.open(write_model(tmp_path / "plain.gguf", plain)[0]) as file:
        spec = with_layers(read_spec(file.metadata, file.tensors), MoeSpec, router=router)
    for name, values in vectors.items():
        plain.tensors[f"blk.0.{name}"] = values
    with GGUFFile.open(write_model(tmp_path / "model.gguf", plain)[0]) as file:
        moe = spec.layers[0].ffn
        assert isinstance(moe, MoeSpec)
        loader = Loader(file, spec, ReferenceOps())
        found = loader.router("blk.0.", moe)
        assert check_small_tensors(spec, loader.vectors) == ()
        names = {
            name for requirement in ffn_tensors(spec.layers[0], spec.hidden_size) for name in requirement[0]
        }
        assert vectors.keys() <= names
    return found


def test_biases_are_loaded(tmp_path: Path) -> None:
    """−∞ among them disables an expert."""
    bias = np.arange(SMALL.experts, dtype=np.float32)
    selection_bias = -bias
    selection_bias[1] = -np.inf
    router = RouterSpec("sigmoid", bias=True, selection_bias=True, scale=2.5)
    vectors = {"ffn_gate_inp.bias": bias, "exp_probs_b.bias": selection_bias}
    found = load_router(tmp_path, router, vectors)
    assert found.rule.spec == router
    assert found.rule.bias.tolist() == bias.tolist()
    assert found.rule.selection_bias.tolist() == selection_bias.tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_other_biases_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    bias = np.full(SMALL.experts, value, np.float32)
    with pytest.raises(InconsistentError, match="exp_probs_b"):
        load_router(tmp_path, LAGUNA, {"exp_probs_b.bias": bias})


def test_a_plain_router_has_no_vectors(tmp_path: Path) -> None:
    assert load_router(tmp_path, RouterSpec(), {}).rule.is_plain


def test_scales_of_a_router_are_no_scales_of_weights(tmp_path: Path) -> None:
    """Those of other names still are: an NVFP4 file has them."""
    model = make_model("qwen3moe", dims=SMALL, quant="F32", tokenizer=False)
    with GGUFFile.open(write_model(tmp_path / "plain.gguf", model)[0]) as file:
        plain = read_spec(file.metadata, file.tensors)
    spec = with_layers(plain, MoeSpec, router=RouterSpec(own_input=True, expert_scale=True))
    for layer in range(spec.num_layers):
        model.tensors[f"blk.{layer}.ffn_gate_inp.scale"] = np.ones(SMALL.hidden, np.float32)
        model.tensors[f"blk.{layer}.ffn_down_exps.scale"] = np.ones(SMALL.experts, np.float32)
    with GGUFFile.open(write_model(tmp_path / "model.gguf", model)[0]) as file:
        assert validate_tensors(spec, file.tensors) == ()
        with pytest.raises(UnsupportedError, match="an NVFP4 file"):
            validate_tensors(plain, file.tensors)
    model.tensors["blk.0.ffn_up_exps.scale"] = np.ones(SMALL.experts, np.float32)
    with (
        GGUFFile.open(write_model(tmp_path / "other.gguf", model)[0]) as file,
        pytest.raises(UnsupportedError, match=r"ffn_up_exps\.weight \(an NVFP4 file\)"),
    ):
        validate_tensors(spec, file.tensors)
