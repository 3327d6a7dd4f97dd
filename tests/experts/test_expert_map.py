"""The picture of experts: shares of recent steps, against their definition, and its bytes."""

from base64 import b64decode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.expert_map import DECAY, ExpertMap, ExpertUses

LAYERS, EXPERTS = 3, 5
steps = st.lists(st.lists(st.integers(0, LAYERS * EXPERTS - 1), max_size=8), max_size=12)


def by_definition(history: list[list[int]]) -> np.ndarray:
    """Each step's uses, weighted by `DECAY` to the power of its age."""
    weights = [DECAY ** (len(history) - 1 - i) for i in range(len(history))]
    shares = np.zeros(LAYERS * EXPERTS)
    for weight, used in zip(weights, history, strict=True):
        shares[list(set(used))] += weight
    return (shares / max(sum(weights), 1e-9)).reshape(LAYERS, EXPERTS)


@given(steps)
def test_shares_are_those_of_their_definition(history: list[list[int]]) -> None:
    uses = ExpertUses(LAYERS, EXPERTS)
    for used in history:
        uses.observe(np.array(used, np.int64))
    np.testing.assert_allclose(uses.shares(), by_definition(history), rtol=1e-12)


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=LAYERS, max_size=LAYERS) | st.just([7] * 6), max_size=9)
)
def test_ids_by_layer_are_the_same_uses(history: list[list[int]]) -> None:
    by_number, by_layer = ExpertUses(LAYERS, EXPERTS), ExpertUses(LAYERS, EXPERTS)
    for used in history:
        ids = np.array(used, np.int32).reshape(LAYERS, -1) % EXPERTS
        by_number.observe(np.unique(ids + EXPERTS * np.arange(LAYERS)[:, None]))
        by_layer.observe_ids(ids)
    assert np.array_equal(by_number.shares(), by_layer.shares())


def test_weights_do_not_overflow_in_many_steps() -> None:
    uses = ExpertUses(1, 2)
    for _ in range(50_000):
        uses.observe(np.array([0], np.int64))
    uses.observe(np.array([1], np.int64))
    np.testing.assert_allclose(uses.shares(), [[DECAY, 1 - DECAY]], rtol=1e-6)


@pytest.mark.parametrize("has_budget", [False, True])
def test_a_map_is_bytes_in_order_of_layers_and_experts(has_budget: bool) -> None:
    uses = ExpertUses(2, 3)
    uses.observe(np.array([1, 5], np.int64))
    resident = np.array([[True, False, False], [False, False, True]])
    picture = ExpertMap.of([0, 7], uses, resident if has_budget else None)
    assert (picture.layers, picture.num_experts) == ((0, 7), 3)
    assert b64decode(picture.uses) == bytes([0, 255, 0, 0, 0, 255])
    if has_budget:
        assert picture.resident is not None
        assert b64decode(picture.resident) == bytes([1, 0, 0, 0, 0, 1])
    else:
        assert picture.resident is None
