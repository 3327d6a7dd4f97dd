"""A GPU's times by type are those of the result file."""

import itertools
import json
from dataclasses import astuple
from pathlib import Path

import pytest

from coldstream.gguf.quant_types import QuantType
from coldstream.placement.gpu_types import GPU_TIMES, MEASURED_TYPE, product_time

RESULT = Path(__file__).resolve().parents[2] / "docs/results/gpu/types.json"


def test_the_table_is_what_was_measured() -> None:
    """Every quantised type, to two digits."""
    ratios = {
        (row["type"], row["what"], row["rows"]): row["ratio"]
        for row in json.loads(RESULT.read_text())["results"]
    }
    quantised = {kind for kind in QuantType if kind.block_elements > 1}
    assert set(GPU_TIMES) == quantised
    for kind in quantised - {MEASURED_TYPE}:
        time, cases = product_time(kind), itertools.product((1, 2048), ("dense", "experts"))
        expected = [ratios[kind.name, what, rows] for rows, what in cases]
        assert list(astuple(time)) == pytest.approx(expected, abs=0.006)


def test_the_measured_type_is_one() -> None:
    assert astuple(product_time(MEASURED_TYPE)) == (1.0, 1.0, 1.0, 1.0)


def test_prompts_of_float_types_take_longest() -> None:
    """They are multiplied as float32, without tensor cores."""
    slowest = max(max(time.prompt, time.experts_prompt) for time in GPU_TIMES.values())
    floats = [kind for kind in QuantType if kind.block_elements == 1]
    assert floats
    assert all(product_time(kind).prompt > slowest for kind in floats)
