"""The unpacked form of every quantised block, and the bit operations that its unpackers share."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class IntegerBlocks:
    """Blocks of n values as integers and a few float scales.

    Value i, which lies in sub-block j = i div (n / S), is (d · scales[j]) · codes[i] − dmin · mins[j]; a type
    without minimum has neither dmin nor mins. For every type the products are exact in float32.
    """

    codes: torch.Tensor  # int32 [..., B, n]
    d: torch.Tensor  # float32 [..., B]
    scales: torch.Tensor  # int32 [..., B, S]
    dmin: torch.Tensor | None = None  # float32 [..., B]
    mins: torch.Tensor | None = None  # int32 [..., B, S]

    def values(self) -> torch.Tensor:
        """float32 [..., B · n]."""
        codes = grouped(self.codes, self.scales.shape[-1], -1)  # [..., B, S, n / S]
        values = (self.d.unsqueeze(-1) * self.scales).unsqueeze(-1) * codes
        if self.dmin is not None and self.mins is not None:
            values = values - (self.dmin.unsqueeze(-1) * self.mins).unsqueeze(-1)
        return values.flatten(-3)


def grouped(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last dimension split into `sizes`, of which one may be −1."""
    return torch.unflatten(values, -1, sizes)


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, as float32 [..., B]."""
    # A copy, because a view as float16 would need an even address.
    raw = blocks[..., at : at + 2].clone(memory_format=torch.contiguous_format)
    return raw.view(torch.float16).squeeze(-1).float()


def signed_bytes(raw: torch.Tensor) -> torch.Tensor:
    """uint8 read as int8, as int32."""
    return raw.view(torch.int8).int()


def fields(raw: torch.Tensor, bits: int) -> torch.Tensor:
    """The 8 / bits fields of each byte, lowest first: [..., n] → int32 [..., 8 / bits, n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32).unsqueeze(-1)
    return (raw.int().unsqueeze(-2) >> shifts) & ((1 << bits) - 1)


def inner_fields(raw: torch.Tensor, bits: int) -> torch.Tensor:
    """As `fields`, with those of one byte adjacent: [..., n] → int32 [..., n · 8 / bits]."""
    return fields(raw, bits).transpose(-1, -2).flatten(-2)


def ones(blocks: torch.Tensor) -> torch.Tensor:
    """The scale 1 of a block that is its own sub-block: int32 [..., B, 1]."""
    return torch.ones((*blocks.shape[:-1], 1), dtype=torch.int32)
