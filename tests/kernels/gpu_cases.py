"""Shared by tests of GPU kernels: weights at awkward addresses, and comparison of floats."""

import numpy as np
import torch

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.quant_tensor import QuantTensor
from device_arrays import tensor_of


def on_gpu(weight: QuantTensor, offset: int = 0, device: str = "cuda") -> QuantTensor:
    """A copy whose first byte lies `offset` behind a multiple of 64, in memory rounded up to 16 bytes."""
    num_bytes = weight.blocks.numel()
    memory = torch.zeros(-(-(num_bytes + offset) // 16) * 16, dtype=torch.uint8, device=device)
    blocks = memory[offset : offset + num_bytes].view(weight.blocks.shape)
    blocks.copy_(weight.blocks)
    return QuantTensor(blocks, weight.quant_type, weight.shape)


def assert_same(actual: DeviceArray, expected: DeviceArray) -> None:
    """Equal float32 bits, where any NaN equals any other and −0 equals 0."""
    np.testing.assert_array_equal(tensor_of(actual).numpy(), tensor_of(expected).numpy())
