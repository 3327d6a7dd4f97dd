"""What the tests of the products of many rows on a GPU share."""

import torch

from coldstream.kernels.arithmetic.reference import (
    GROUP_SIZE,
    SUM_SIZE,
    QuantActivations,
    quantize_activations,
)
from coldstream.kernels.quant_tensor import QuantTensor


def padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """The last dimension filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % multiple))


def device_activations(x: torch.Tensor) -> QuantActivations:
    """float32 x [T, K] quantised as the reference does, on the device, in whole groups."""
    quantized = quantize_activations(x)
    return QuantActivations(
        padded(quantized.q, GROUP_SIZE).cuda(),
        quantized.scales.cuda(),
        padded(quantized.sums, GROUP_SIZE // SUM_SIZE).cuda(),
    )


def device_weight(tensor: QuantTensor, offset: int = 0) -> QuantTensor:
    """A copy on the device whose address is `offset` bytes past a multiple of 256."""
    data = tensor.blocks.reshape(-1)
    memory = torch.full((data.numel() + offset + 256,), 0xFF, dtype=torch.uint8, device="cuda")
    place = memory[offset : offset + data.numel()]
    place.copy_(data)
    return QuantTensor(place.view(tensor.blocks.shape), tensor.quant_type, tensor.shape)
