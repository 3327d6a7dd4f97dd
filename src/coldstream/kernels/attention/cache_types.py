"""Keys and values in the types of a cache, in PyTorch; `cache_layout.py` defines a row."""

import torch

from coldstream.kernels.arithmetic.reference import LARGEST_CODE
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS, INTEGER_SCALE_BYTES, CacheLayout
from coldstream.kernels.attention.hadamard import head_block, rotate_head, rotate_head_back
from coldstream.kernels.attention.levels import pack_levels, round_levels, unpack_levels
from coldstream.kernels.attention.planes import LOW_UNIT, Planes, round_planes
from coldstream.kernels.dequantize.integer_blocks import grouped

LARGEST_NIBBLE = 7  # of `i4`, symmetric: −8 has no counterpart


class CacheType(CacheLayout):
    """A layout with conversions."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the cache tensor."""
        dtype: torch.dtype = getattr(torch, self.element)
        return dtype

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [..., D] → rows of the tensor, [..., row]; integer types are rotated first."""
        if not self.is_integer:
            return values.to(self.dtype)
        return self._encode_planes(self._round(rotate_head(values.float())))

    def decode(self, rows: torch.Tensor, head_dim: int) -> torch.Tensor:
        """[..., row] → float32 [..., D], still rotated if the type is an integer one."""
        return self.planes(rows, head_dim).values() if self.is_integer else rows.float()

    def planes(self, rows: torch.Tensor, head_dim: int) -> Planes:
        """Rows [..., row] of an integer type → their planes [..., D] and scales [...]."""
        code_bytes = head_dim * self.value_bits // 8
        packed, tail = rows[..., :code_bytes], rows[..., code_bytes:]
        scales = tail[..., :INTEGER_SCALE_BYTES].contiguous().view(torch.float32).squeeze(-1)
        if self.is_packed:
            codes = _unpack(packed.contiguous().view(torch.uint8), self.value_bits).int()
        else:
            planes = grouped(packed.int(), self.num_planes, head_dim)
            high, low = planes[..., 0, :], planes[..., -1, :]
            codes = high if self.num_planes == 1 else LOW_UNIT * high + low
        return Planes(codes, scales, self.num_planes)

    def _round(self, rotated: torch.Tensor) -> Planes:
        if self.value_bits == 3:
            return round_levels(rotated)
        return round_planes(
            rotated, self.num_planes, LARGEST_CODE if self.value_bits >= 8 else LARGEST_NIBBLE
        )

    def _encode_planes(self, planes: Planes) -> torch.Tensor:
        parts = [planes.high] if self.num_planes == 1 else [planes.high, planes.low]
        if self.value_bits == 4:
            parts = [_pack_nibbles(planes.codes)]
        elif self.value_bits == 3:
            parts = [pack_levels(planes.codes)]
        scales = planes.scale.unsqueeze(-1).view(torch.int8)
        row = torch.cat((*(part.to(torch.uint8).view(torch.int8) for part in parts), scales), dim=-1)
        return torch.nn.functional.pad(row, (0, self.row_bytes(planes.codes.shape[-1]) - row.shape[-1]))

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [..., D] whose product with rotated keys is that of `query` with the keys."""
        return rotate_head(query) * (1 / head_block(query.shape[-1])) if self.is_integer else query

    def rotate_back(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse rotation of decoded values, or sums of them, float32 [..., D]."""
        return rotate_head_back(values) if self.is_integer else values


CACHE_TYPES = {name: CacheType(**vars(layout)) for name, layout in CACHE_LAYOUTS.items()}


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., n] in −8 … 7 of any type → bytes [..., n / 2], the even ones in the low halves."""
    nibbles = (codes + 8).to(torch.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def _unpack(packed: torch.Tensor, value_bits: int) -> torch.Tensor:
    """Bytes of codes of three or four bits → their values, int8 [..., D]."""
    if value_bits == 3:
        return unpack_levels(packed)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
