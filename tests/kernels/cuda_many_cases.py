"""What the tests of the products of many rows on a GPU share."""

import torch

from coldstream.kernels.arithmetic.reference import (
    GROUP_SIZE,
    SUM_SIZE,
    QuantActivations,
    quantize_activations,
)
from coldstream.kernels.quant_tensor import QuantTensor

POISON = 1234.5


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


class GuardedOutput:
    """float32 rows on the device between others that nobody may write."""

    def __init__(self, num_rows: int, num_cols: int, *, pad: int = 0) -> None:
        self._memory = torch.full((num_rows + 2, num_cols + pad), POISON, device="cuda")
        self.rows = self._memory[1:-1, :num_cols]

    def checked(self) -> torch.Tensor:
        """A copy of the rows on the host; AssertionError if anything around them changed."""
        rows = self.rows.cpu()
        self.rows.fill_(POISON)
        assert (self._memory == POISON).all()
        return rows
