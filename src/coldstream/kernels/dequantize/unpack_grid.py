"""Unpackers of the types whose codes are entries of a grid: eight or four values chosen by one index.

`blocks` is uint8 [..., B, block_bytes] throughout. Layouts: the block structures of ggml's public headers.
An index has exactly as many bits as its grid needs, so no block can point outside one.
"""

import torch

from coldstream.kernels.dequantize.grids import (
    Grid,
    iq1_grid,
    iq2_s_grid,
    iq2_xs_grid,
    iq2_xxs_grid,
    iq3_s_grid,
    iq3_xxs_grid,
)
from coldstream.kernels.dequantize.integer_blocks import IntegerBlocks, fields, grouped, half, inner_fields


def words(raw: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Consecutive little-endian unsigned integers: uint8 [..., n · num_bytes] → int64 [..., n]."""
    places = torch.arange(0, 8 * num_bytes, 8)
    return (grouped(raw, -1, num_bytes).long() << places).sum(dim=-1)


def entries(grid: Grid, index: torch.Tensor) -> torch.Tensor:
    """Those that int64 `index` [...] chooses: int32 [..., values of an entry]."""
    return torch.from_numpy(grid)[index]


def bit_field(values: torch.Tensor, shifts: range, bits: int) -> torch.Tensor:
    """Fields of `bits` bits at each of `shifts`: int64 [...] → int64 [..., len(shifts)]."""
    return (values.unsqueeze(-1) >> torch.tensor(shifts)) & ((1 << bits) - 1)


def signs(raw: torch.Tensor) -> torch.Tensor:
    """±1 for each bit, lowest first, set meaning minus: int [..., n] → int32 [..., n · 8]."""
    return 1 - 2 * inner_fields(raw, 1)


def even_signs(indices: torch.Tensor) -> torch.Tensor:
    """Signs of eight values, an even number of them negative: 7 bits give seven, parity gives the last."""
    parity = fields(indices, 1).sum(dim=-2) & 1
    return signs(indices | parity << 7)


def unpack_iq2_xxs(blocks: torch.Tensor) -> IntegerBlocks:
    groups = grouped(blocks[..., 2:], 8, 8)  # four grid indices, then a word of signs and scale
    word = words(groups[..., 4:], 4).squeeze(-1)
    grid = entries(iq2_xxs_grid(), groups[..., :4].long()).flatten(-3)
    return IntegerBlocks(
        grid * even_signs(bit_field(word, range(0, 28, 7), 7).flatten(-2)),
        half(blocks, 0) / 8,
        (1 + 2 * (word >> 28)).int(),
    )


def unpack_iq2_xs(blocks: torch.Tensor) -> IntegerBlocks:
    word = words(blocks[..., 2:66], 2)
    grid = entries(iq2_xs_grid(), word & 511).flatten(-2)
    return IntegerBlocks(
        grid * even_signs(word >> 9), half(blocks, 0) / 8, 1 + 2 * inner_fields(blocks[..., 66:], 4)
    )


def unpack_iq2_s(blocks: torch.Tensor) -> IntegerBlocks:
    index = blocks[..., 2:34].long() + 256 * inner_fields(blocks[..., 66:74], 2)
    grid = entries(iq2_s_grid(), index).flatten(-2)
    return IntegerBlocks(
        grid * signs(blocks[..., 34:66]), half(blocks, 0) / 8, 1 + 2 * inner_fields(blocks[..., 74:], 4)
    )


def unpack_iq3_xxs(blocks: torch.Tensor) -> IntegerBlocks:
    word = words(blocks[..., 66:], 4)
    grid = entries(iq3_xxs_grid(), blocks[..., 2:66].long()).flatten(-2)
    return IntegerBlocks(
        grid * even_signs(bit_field(word, range(0, 28, 7), 7).flatten(-2)),
        half(blocks, 0) / 4,
        (1 + 2 * (word >> 28)).int(),
    )


def unpack_iq3_s(blocks: torch.Tensor) -> IntegerBlocks:
    index = blocks[..., 2:66].long() + 256 * inner_fields(blocks[..., 66:74], 1)
    grid = entries(iq3_s_grid(), index).flatten(-2)
    return IntegerBlocks(
        grid * signs(blocks[..., 74:106]), half(blocks, 0), 1 + 2 * inner_fields(blocks[..., 106:], 4)
    )


def shifted(grid: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Eight times grid values that are moved up or down by an eighth: int32 [..., g, 8] → [..., g · 8]."""
    return (8 * grid + (1 - 2 * negative).unsqueeze(-1)).int().flatten(-2)


def unpack_iq1_s(blocks: torch.Tensor) -> IntegerBlocks:
    word = words(blocks[..., 34:], 2)
    index = blocks[..., 2:34].long() + 256 * bit_field(word, range(0, 12, 3), 3).flatten(-2)
    negative = (word >> 15).repeat_interleave(4, dim=-1)
    scales = 1 + 2 * (word >> 12 & 7)
    return IntegerBlocks(shifted(entries(iq1_grid(), index), negative), half(blocks, 0) / 8, scales.int())


def unpack_iq1_m(blocks: torch.Tensor) -> IntegerBlocks:
    high = inner_fields(blocks[..., 32:48], 4)
    index = blocks[..., :32].long() + 256 * (high & 7)
    word = words(blocks[..., 48:], 2)
    # The top nibbles of the four words are the float16 scale of the block.
    d_bits = ((word >> 12) << torch.arange(0, 16, 4)).sum(dim=-1)
    d = half(torch.stack((d_bits & 255, d_bits >> 8), dim=-1).to(torch.uint8), 0)
    scales = 1 + 2 * bit_field(word, range(0, 12, 3), 3).flatten(-2)
    return IntegerBlocks(shifted(entries(iq1_grid(), index), high >> 3), d / 8, scales.int())
