"""The table of a GPU's times by type is written from its results, and nothing else in its file is."""

import re

import pytest

from bench.kernels.gpu_type_table import TABLE, entry, ratios, rewrite
from coldstream.gguf.quant_types import QuantType


def test_the_table_is_what_the_results_give() -> None:
    """Whatever it was before."""
    text = TABLE.read_text()
    assert rewrite(text, ratios()) == text
    other, count = re.subn(r"ProductTime\(\d.*\)", "ProductTime(9.00, 9.00, 9.00, 9.00)", text)
    assert count == len(QuantType)
    assert rewrite(other, ratios()) == text
    assert rewrite(re.sub(r"    QuantType\.Q.*\n", "", text), ratios()) == text


def test_experts_that_were_measured_are_not_as_dense_products() -> None:
    measured = {("F16", "dense", rows): float(rows) for rows in (1, 2048)}
    assert entry(QuantType.F16, measured) == "    QuantType.F16: ProductTime(1.00, 1.00, 2048.00, 2048.00),\n"
    measured |= {("F16", "experts", 1): 3.0, ("F16", "experts", 2048): 4.0}
    assert entry(QuantType.F16, measured) == "    QuantType.F16: ProductTime(1.00, 3.00, 2048.00, 4.00),\n"
    with pytest.raises(KeyError):
        entry(QuantType.BF16, measured)


def test_a_file_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="0 runs of entries"):
        rewrite("GPU_TIMES = {}\n", ratios())
