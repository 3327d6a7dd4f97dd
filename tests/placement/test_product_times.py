"""A GPU's times by type are those of the result file."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from coldstream.gguf.quant_types import QuantType
from coldstream.placement.gpu_types import GPU_TIMES, MEASURED_TYPE, product_time

RESULT = Path(__file__).resolve().parents[2] / "docs/results/gpu/types.json"


def test_the_table_is_what_was_measured() -> None:
    """Every quantised type, to two digits."""
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in json.loads(RESULT.read_text())["results"]:
        ratios[row["type"], row["rows"]].append(row["ratio"])
    quantised = {kind for kind in QuantType if kind.block_elements > 1}
    assert set(GPU_TIMES) == quantised
    for kind in quantised - {MEASURED_TYPE}:
        assert product_time(kind).one_row == pytest.approx(mean(ratios[kind.name, 1]), abs=0.006)
        assert product_time(kind).prompt == pytest.approx(mean(ratios[kind.name, 2048]), abs=0.006)


def test_the_measured_type_is_one() -> None:
    assert product_time(MEASURED_TYPE).one_row == product_time(MEASURED_TYPE).prompt == 1.0


def test_prompts_of_float_types_take_longest() -> None:
    """They are multiplied as float32, without tensor cores."""
    slowest = max(time.prompt for time in GPU_TIMES.values())
    floats = [kind for kind in QuantType if kind.block_elements == 1]
    assert floats
    assert all(product_time(kind).prompt > slowest for kind in floats)
