"""Outputs of GPU kernels that detect writes out of bounds."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD_BYTES = 4096
GUARD_BYTE = 0xA5
POISON_BYTE = 0xFF  # NaN as float16 and float32, −1 as an integer


class Guarded:
    """Poison inside a larger buffer, `gap` elements behind every row; `tensor` is what a launcher gets."""

    def __init__(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = DEVICE,
        gap: int = 0,
    ) -> None:
        wide = (*shape[:-1], shape[-1] + gap)
        self._shape, self._dtype = wide, dtype
        num_bytes = torch.Size(wide).numel() * dtype.itemsize
        self._buffer = torch.full(
            (num_bytes + 2 * GUARD_BYTES,), GUARD_BYTE, dtype=torch.uint8, device=device
        )
        self.tensor = self._inside(self._buffer)[..., : shape[-1]]
        self.tensor.copy_(self._inside(torch.full_like(self._buffer, POISON_BYTE))[..., : shape[-1]])

    def _inside(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part of a buffer of this layout between its ends, gaps included."""
        return buffer[GUARD_BYTES:-GUARD_BYTES].view(self._dtype).view(self._shape)

    def checked(self) -> torch.Tensor:
        """A contiguous copy of the tensor on the CPU, around which nothing may have been written."""
        guards, around = torch.full_like(self._buffer, GUARD_BYTE), self._buffer.clone()
        cols = self.tensor.shape[-1]
        self._inside(around)[..., :cols].copy_(self._inside(guards)[..., :cols])
        assert torch.equal(around, guards), "something was written outside the output"
        return self.tensor.cpu().contiguous().clone()
