"""Divergences from float activations: their figures, and one comparison with llama.cpp from files on."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.kernels.activation_scales import Divergences, Row, divergence, measure, passages, write_rows
from coldstream.gguf.quant_types import QuantType


def test_divergence_of_two_distributions() -> None:
    exact = np.log(np.array([[0.5, 0.5], [0.25, 0.75]], np.float32))
    other = np.log(np.array([[0.25, 0.75], [0.25, 0.75]], np.float32)) + np.float32(3)
    assert divergence(exact, exact) == 0
    assert divergence(exact, other) == pytest.approx((0.5 * np.log(2) + 0.5 * np.log(2 / 3)) / 2, rel=1e-6)


def test_the_interval_is_of_pairs() -> None:
    theirs = np.random.default_rng(0).lognormal(sigma=2, size=50)
    figures = Divergences(1.5 * theirs, theirs).figures()
    assert all(value == pytest.approx(1.5) for name, value in figures.items() if "ratio" in name)
    assert figures["ours"] == pytest.approx(1.5 * figures["llama_cpp"])


def test_more_passages_say_more() -> None:
    ours, theirs = np.random.default_rng(0).lognormal(size=(2, 400))
    short, long = (Divergences(ours[:n], theirs[:n]).figures() for n in (25, 400))
    width = {
        "short": short["ratio_high"] - short["ratio_low"],
        "long": long["ratio_high"] - long["ratio_low"],
    }
    assert 0 < 2 * width["long"] < width["short"]
    assert long["passage_ratio_low"] < long["ratio_low"] < long["ratio"] < long["ratio_high"]


@pytest.mark.sharded(of="measurements")
def test_passages_are_of_one_length_and_differ() -> None:
    found = passages(3)
    assert {len(ids) for ids in found} == {512}
    assert len({tuple(ids) for ids in found}) == 3


def measured(quant_type: QuantType, num_passages: int) -> tuple[Row, float]:
    found: list[tuple[Row, float]] = []
    measure([quant_type], {1: num_passages}, 2, lambda *figures: found.append(figures))
    (only,) = found
    return only


@pytest.mark.sharded(of="measurements")
def test_rounding_costs_about_what_it_costs_llama_cpp() -> None:
    row, floats = measured(QuantType.Q8_0, 2)
    assert 0 < floats < 1e-10
    assert (row["type"], row["scale_inputs"], row["passages"]) == ("Q8_0", 32, 2)
    assert 0.3 < row["ratio"] < 3
    assert 1e-5 < row["llama_cpp"] < 1e-3


@pytest.mark.sharded(of="measurements")
def test_a_type_that_llama_cpp_lacks_is_held_to_its_own_twin() -> None:
    row, _ = measured(QuantType.Q2_0, 1)
    assert (row["type"], row["scale_inputs"]) == ("Q2_0", 32)
    assert 0 < row["ours"] < 1e-2
    assert "llama_cpp" not in row


def test_rows_replace_those_of_the_same_type_and_outliers(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    rows = [{"type": kind, "outliers": factor, "ours": 1} for factor in (20, 1) for kind in ("IQ3_S", "Q4_0")]
    write_rows(path, rows, 0.5)
    write_rows(path, [rows[1] | {"ours": 2}], 0.5)
    found = [(row["type"], row["outliers"], row["ours"]) for row in json.loads(path.read_text())["rows"]]
    assert found == [("Q4_0", 1, 1), ("IQ3_S", 1, 1), ("Q4_0", 20, 2), ("IQ3_S", 20, 1)]
