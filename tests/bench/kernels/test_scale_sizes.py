"""Divergences by the size of activation groups, from files on."""

import pytest
import torch

from bench.kernels.scale_sizes import measure, rounded
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import quantize_activations


def test_activations_are_rounded_by_their_own_groups() -> None:
    x = torch.randn(3, 320, generator=torch.Generator().manual_seed(1))
    x[:, 300] = 100
    for size in (32, 256):
        steps = quantize_activations(x, size).scales.repeat_interleave(size, dim=-1)[:, :320]
        assert ((rounded(x, size) - x).abs() <= 0.5001 * steps).all()
    assert torch.equal(rounded(x, 32)[:, :256], rounded(x[:, :256], 32))


@pytest.mark.sharded(of="measurements")
def test_smaller_groups_lose_less_and_blocks_of_32_what_llama_cpp_loses() -> None:
    result = measure([QuantType.Q8_0], [1], num_passages=1, threads=2)
    (row,) = result["rows"]
    assert (row["type"], row["outliers"], row["passages"]) == ("Q8_0", 1, 1)
    ratios = {size: figures["ratio"] for size, figures in row["by_size"].items()}
    assert 0.3 < ratios["32"] < 3
    assert ratios["256"] > 1.2 * ratios["32"]
