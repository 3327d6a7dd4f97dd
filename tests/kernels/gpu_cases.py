"""What the tests of GPU kernels share: outputs that notice careless writes, weights at awkward addresses."""

import numpy as np
import torch

from coldstream.kernels.quant_tensor import QuantTensor

GUARD = 16  # elements before, after and between the rows of an output
SENTINEL = -1234.5


class Output:
    """Rows of NaN inside a larger buffer of sentinels; `rows` is the view to hand to a kernel."""

    def __init__(self, *shape: int, gap: int = GUARD) -> None:
        count = torch.Size(shape[:-1]).numel()
        self.buffer = torch.full((count * (shape[-1] + gap) + 2 * GUARD,), SENTINEL, device="cuda")
        strides = [shape[-1] + gap]
        for length in reversed(shape[1:-1]):
            strides.insert(0, strides[0] * length)
        self.rows = self.buffer.as_strided(shape, (*strides, 1), GUARD)
        self.rows.fill_(torch.nan)

    def checked(self) -> torch.Tensor:
        """A copy of the rows on the CPU; nothing may be written around them."""
        result = self.rows.cpu()
        self.rows.fill_(SENTINEL)
        assert self.buffer.eq(SENTINEL).all(), "something was written outside the output"
        return result


def on_gpu(weight: QuantTensor, offset: int = 0) -> QuantTensor:
    """A copy whose first byte lies `offset` behind a multiple of 256, in memory rounded up to 16 bytes."""
    num_bytes = weight.blocks.numel()
    memory = torch.zeros(-(-(num_bytes + offset) // 16) * 16, dtype=torch.uint8, device="cuda")
    blocks = memory[offset : offset + num_bytes].view(weight.blocks.shape)
    blocks.copy_(weight.blocks)
    return QuantTensor(blocks, weight.quant_type, weight.shape)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal float32 bits, where any NaN equals any other and −0 equals 0."""
    np.testing.assert_array_equal(actual.cpu().numpy(), expected.numpy())
