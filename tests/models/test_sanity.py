"""Values that give away a wrong converter."""

from collections.abc import Callable

import numpy as np
import pytest

from builders import SMALL, TinyModel, make_model
from coldstream.errors import InconsistentError
from coldstream.models import ModelSpec, check_small_tensors

LoadSpec = Callable[[TinyModel], ModelSpec]


@pytest.fixture
def model() -> TinyModel:
    return make_model(dims=SMALL, quant="F32", tokenizer=False)


def test_a_well_converted_model_passes(load_spec: LoadSpec, model: TinyModel) -> None:
    assert check_small_tensors(load_spec(model), model.tensors) == ()
    assert check_small_tensors(load_spec(model), {}) == ()


@pytest.mark.parametrize(("shift", "cause"), [(-1, "never added 1"), (1, "added 1 twice")])
def test_norm_weights_off_by_one(load_spec: LoadSpec, model: TinyModel, shift: int, cause: str) -> None:
    tensors = {name: v + shift * name.endswith("_norm.weight") for name, v in model.tensors.items()}
    (warning,) = check_small_tensors(load_spec(model), tensors)
    assert cause in warning


def test_one_odd_layer_is_no_wrong_converter(load_spec: LoadSpec, model: TinyModel) -> None:
    model.tensors["blk.0.attn_norm.weight"] *= 0.1
    assert check_small_tensors(load_spec(model), model.tensors) == ()


def test_a_log_instead_of_its_exponential(load_spec: LoadSpec, model: TinyModel) -> None:
    model.tensors["blk.1.ssm_a"] = np.log(-model.tensors["blk.1.ssm_a"]).clip(0)
    with pytest.raises(InconsistentError, match=r"blk\.1\.ssm_a holds .* stored A_log"):
        check_small_tensors(load_spec(model), model.tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(load_spec: LoadSpec, model: TinyModel, value: float) -> None:
    spec = load_spec(model)
    model.tensors["output_norm.weight"][3] = value
    with pytest.raises(InconsistentError, match=r"output_norm\.weight holds a NaN or an infinity"):
        check_small_tensors(spec, model.tensors)
