"""The figures that compare types of keys and values."""

import numpy as np
import pytest
import torch
from tools.train_demo.held_out import scoring_windows

from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.models.causal_lm import CausalLM
from coldstream.models.spec import ModelSpec
from kv_types import EXACT, TYPES, Loss, measure


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


def test_every_type_is_measured_and_fewer_bits_are_further_away() -> None:
    with GGUFFile.open(demo_model_path()) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        model = CausalLM.load(file, spec, ReferenceOps())
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, 60)
    losses = measure(model, ids, list(scoring_windows(len(ids), 40)))
    assert set(losses) == set(TYPES)
    assert {len(loss.nats) for loss in losses.values()} == {59}
    distances = {name: loss.figures(losses[EXACT])["logit_distance"] for name, loss in losses.items()}
    assert (
        0
        == distances["f32"]
        < distances["i16"]
        < distances["f16"]
        < distances["i8"]
        < distances["i4"]
        < distances["i3"]
    )
