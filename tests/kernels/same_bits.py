"""Comparison of results of kernels."""

import torch


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal shapes, types and bits, except that any NaN equals any other."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected = actual.cpu(), expected.cpu()
    if expected.dtype.is_floating_point:
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan), "NaN elsewhere than expected"
        actual, expected = actual[~nan].view(torch.uint8), expected[~nan].view(torch.uint8)
    assert torch.equal(actual, expected), f"{int((actual != expected).sum())} bytes differ"
