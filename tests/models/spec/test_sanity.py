"""Values that give away a wrong converter."""

from collections.abc import Callable

import numpy as np
import pytest

from builders import SMALL, TinyModel, make_model
from coldstream.errors import GenerationFault, InconsistentError
from coldstream.models import ModelSpec, check_small_tensors
from coldstream.models.spec.sanity import check_logits

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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_that_are_not_finite_are_named(bad: float, rows: int) -> None:
    logits = np.ones((rows, 50), np.float32)
    check_logits(logits, 7)
    logits[rows - 1, [4, 9]] = bad
    message = rf"2 of 50 logits at position {7 + rows - 1} are not finite;"
    with pytest.raises(GenerationFault, match=message):
        check_logits(logits, 7)
    with pytest.raises(GenerationFault, match="2 of 50 logits at position 7 are"):
        check_logits(logits[-1], 7)


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_one_decay_that_is_not_below_zero_is_enough(
    load_spec: LoadSpec, model: TinyModel, value: float
) -> None:
    spec = load_spec(model)
    assert len(model.tensors["blk.1.ssm_a"]) > 1
    model.tensors["blk.1.ssm_a"][-1] = value
    with pytest.raises(InconsistentError, match=r"blk\.1\.ssm_a holds .* expected values below 0"):
        check_small_tensors(spec, model.tensors)


@pytest.mark.parametrize("value", [-1e-30, -1e30])
def test_decays_below_zero_pass_however_small(load_spec: LoadSpec, model: TinyModel, value: float) -> None:
    spec = load_spec(model)
    model.tensors["blk.1.ssm_a"][-1] = value
    assert check_small_tensors(spec, model.tensors) == ()


@pytest.mark.parametrize(("mean", "warns"), [(0.125, True), (0.25, False), (1.75, False), (1.875, True)])
def test_norm_weights_at_the_bounds_pass_and_beyond_them_do_not(
    load_spec: LoadSpec, model: TinyModel, mean: float, warns: bool
) -> None:
    tensors = {name: np.full_like(v, mean) for name, v in model.tensors.items() if "attn_norm" in name}
    assert bool(check_small_tensors(load_spec(model), tensors)) == warns
