"""The figures that compare types of keys and values."""

import numpy as np
import pytest
import torch

from bench.kernels.kv_types import EXACT, TYPES, Loss, float_runners, head_error, measure
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec
from tools.train_demo.held_out import scoring_windows


def test_figures_of_two_tokens() -> None:
    exact, other = Loss(), Loss()
    logits, targets = torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
    exact.add(logits, logits, targets)
    # Twice as many odds against the first target, and the same logits but for a constant.
    other.add(torch.tensor([[0.0, np.log(3.0)], [5.0, 5.0]]), logits, targets)
    assert exact.figures(exact)["perplexity"] == pytest.approx(2)
    assert exact.figures(exact)["loss"] == exact.figures(exact)["logit_distance"] == 0
    figures = other.figures(exact)
    assert figures["perplexity"] == pytest.approx(np.sqrt(4 * 2))
    assert figures["loss"] == pytest.approx(np.sqrt(2) - 1)
    assert figures["loss_standard_error"] == pytest.approx(np.log(2) / 2 / np.sqrt(2))
    assert figures["logit_distance"] == pytest.approx(np.log(3) / 2 / np.sqrt(2))
    assert figures["same_top1"] == 0.5


@pytest.mark.sharded(of="measurements")
def test_every_type_is_measured_and_fewer_bits_are_further_away() -> None:
    with float_runners(threads=1) as runners:
        ids = np.random.default_rng(0).integers(0, runners[EXACT].spec.vocab_size, 60)
        losses = measure(runners, ids, list(scoring_windows(len(ids), 40)))
    assert set(losses) == set(TYPES)
    assert {len(loss.nats) for loss in losses.values()} == {59}
    distances = {name: loss.figures(losses[EXACT])["logit_distance"] for name, loss in losses.items()}
    assert distances["f32"] == 0
    order = [distances[name] for name in ("f32", "i16", "f16", "i8", "i4", "i3")]
    assert order == sorted(set(order))


@pytest.mark.sharded(of="measurements")
def test_all_weights_are_those_of_the_model() -> None:
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        model = CausalLM.load(file, spec, ReferenceOps())
    ids = torch.arange(20)
    cache = ModelCache(spec, model.ops, num_states=1, context_length=20, kv_type=EXACT)
    logits = model.logits(model.forward(ids, Rows(ids.int(), torch.zeros(20, dtype=torch.int32)), cache))
    with float_runners(threads=1) as runners:
        assert np.allclose(logits.numpy(), runners[EXACT].logits(ids.tolist()), atol=1e-3)


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize("outlier", [1, 20])
def test_errors_of_heads_grow_as_bits_get_fewer(outlier: int) -> None:
    errors = [head_error(kv_type, 128, outlier, [0]) for kv_type in ("f32", "i16", "f16", "i8", "i4", "i3")]
    assert errors == sorted(errors)
    assert errors[0] < 1e-5
