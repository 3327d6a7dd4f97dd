"""A GPU's times by type are those of the result files."""

import itertools
import json
from dataclasses import astuple
from pathlib import Path

import pytest

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.shapes import MEASURED_TYPE
from coldstream.placement.gpu_types import GPU_TIMES

RESULTS = Path(__file__).resolve().parents[2] / "docs/results/gpu"
FLOATS = {kind for kind in QuantType if kind.block_elements == 1}


def ratios(name: str) -> dict[tuple[str, str, int], float]:
    rows = json.loads((RESULTS / name).read_text())["results"]
    return {(row["type"], row["what"], row["rows"]): row["ratio"] for row in rows}


def test_the_table_is_what_was_measured() -> None:
    """Every type, to two digits. Experts of floats are as their dense products, unless they were measured."""
    quantised, floats = ratios("types.json"), ratios("float_types.json")
    assert set(GPU_TIMES) == set(QuantType)
    for kind, time in GPU_TIMES.items():
        if kind is not MEASURED_TYPE:
            found = floats if kind in FLOATS else quantised
            expected = [
                found.get((kind.name, what, rows)) or floats[kind.name, "dense", rows]
                for rows, what in itertools.product((1, 2048), ("dense", "experts"))
            ]
            assert list(astuple(time)) == pytest.approx(expected, abs=0.006)


def test_the_measured_type_is_one() -> None:
    assert astuple(GPU_TIMES[MEASURED_TYPE]) == (1.0, 1.0, 1.0, 1.0)
