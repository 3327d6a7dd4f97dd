"""Unpackers of the types whose codes are plain integers or go through a table of 16 values.

`blocks` is uint8 [..., B, block_bytes] throughout. Layouts: the block structures of ggml's public headers.
"""

import torch

from coldstream.kernels.dequantize.integer_blocks import (
    IntegerBlocks,
    fields,
    grouped,
    half,
    inner_fields,
    ones,
    signed_bytes,
)

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def nibbles(raw: torch.Tensor) -> torch.Tensor:
    """All low nibbles, then all high ones: [..., n] → int32 [..., 2n]."""
    return fields(raw, 4).flatten(-2)


def unpack_q4_0(blocks: torch.Tensor) -> IntegerBlocks:
    return IntegerBlocks(nibbles(blocks[..., 2:]) - 8, half(blocks, 0), ones(blocks))


def unpack_q4_1(blocks: torch.Tensor) -> IntegerBlocks:
    one = ones(blocks)
    return IntegerBlocks(nibbles(blocks[..., 4:]), half(blocks, 0), one, -half(blocks, 2), one)


def unpack_q5_0(blocks: torch.Tensor) -> IntegerBlocks:
    codes = nibbles(blocks[..., 6:]) + 16 * inner_fields(blocks[..., 2:6], 1)
    return IntegerBlocks(codes - 16, half(blocks, 0), ones(blocks))


def unpack_q5_1(blocks: torch.Tensor) -> IntegerBlocks:
    one = ones(blocks)
    codes = nibbles(blocks[..., 8:]) + 16 * inner_fields(blocks[..., 4:8], 1)
    return IntegerBlocks(codes, half(blocks, 0), one, -half(blocks, 2), one)


def unpack_q8_0(blocks: torch.Tensor) -> IntegerBlocks:
    return IntegerBlocks(signed_bytes(blocks[..., 2:]), half(blocks, 0), ones(blocks))


def unpack_q2_k(blocks: torch.Tensor) -> IntegerBlocks:
    codes = fields(grouped(blocks[..., 16:80], 2, 32), 2).flatten(-3)
    scales, mins = fields(blocks[..., :16], 4).unbind(-2)
    return IntegerBlocks(codes, half(blocks, 80), scales, half(blocks, 82), mins)


def unpack_q3_k(blocks: torch.Tensor) -> IntegerBlocks:
    low = fields(grouped(blocks[..., 32:96], 2, 32), 2).flatten(-3)
    high = fields(blocks[..., :32], 1).flatten(-2)
    scales = nibbles(blocks[..., 96:104]) + 16 * fields(blocks[..., 104:108], 2).flatten(-2)
    return IntegerBlocks(low + 4 * high - 4, half(blocks, 108), scales - 32)


def scales_and_mins(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and minima that Q4_K and Q5_K pack into 12 bytes: each int32 [..., B, 8]."""
    first, second, rest = grouped(raw.int(), 3, 4).unbind(-2)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6) << 4), dim=-1)
    mins = torch.cat((second & 63, (rest >> 4) | (second >> 6) << 4), dim=-1)
    return scales, mins


def unpack_q4_k(blocks: torch.Tensor) -> IntegerBlocks:
    codes = fields(grouped(blocks[..., 16:], 4, 32), 4).flatten(-3)
    scales, mins = scales_and_mins(blocks[..., 4:16])
    return IntegerBlocks(codes, half(blocks, 0), scales, half(blocks, 2), mins)


def unpack_q5_k(blocks: torch.Tensor) -> IntegerBlocks:
    low = fields(grouped(blocks[..., 48:], 4, 32), 4).flatten(-3)
    high = fields(blocks[..., 16:48], 1).flatten(-2)
    scales, mins = scales_and_mins(blocks[..., 4:16])
    return IntegerBlocks(low + 16 * high, half(blocks, 0), scales, half(blocks, 2), mins)


def unpack_q6_k(blocks: torch.Tensor) -> IntegerBlocks:
    low = fields(grouped(blocks[..., :128], 2, 64), 4).flatten(-3)
    high = fields(grouped(blocks[..., 128:192], 2, 32), 2).flatten(-3)
    return IntegerBlocks(low + 16 * high - 32, half(blocks, 208), signed_bytes(blocks[..., 192:208]))


def unpack_iq4_nl(blocks: torch.Tensor) -> IntegerBlocks:
    table = torch.tensor(IQ4_VALUES, dtype=torch.int32)
    return IntegerBlocks(table[nibbles(blocks[..., 2:])], half(blocks, 0), ones(blocks))


def unpack_iq4_xs(blocks: torch.Tensor) -> IntegerBlocks:
    table = torch.tensor(IQ4_VALUES, dtype=torch.int32)
    codes = table[fields(grouped(blocks[..., 8:], 8, 16), 4)].flatten(-3)
    scales = inner_fields(blocks[..., 4:8], 4) + 16 * inner_fields(blocks[..., 2:4], 2)
    return IntegerBlocks(codes, half(blocks, 0), scales - 32)


def unpack_tq2_0(blocks: torch.Tensor) -> IntegerBlocks:
    """Code 3 is legal and means +2."""
    codes = fields(grouped(blocks[..., :64], 2, 32), 2).flatten(-3)
    return IntegerBlocks(codes - 1, half(blocks, 64), ones(blocks))


def unpack_q2_0(blocks: torch.Tensor) -> IntegerBlocks:
    """A block of 64 values is two of 32 that share d. Code 3 is legal and means +2."""
    codes = grouped(inner_fields(blocks[..., 2:], 2) - 1, 2, 32)  # [..., B, 2, 32]
    d = half(blocks, 0).repeat_interleave(2, dim=-1)
    return IntegerBlocks(codes.flatten(-3, -2), d, torch.ones((*d.shape, 1), dtype=torch.int32))


def unpack_mxfp4(blocks: torch.Tensor) -> IntegerBlocks:
    """The scale is 2^(e − 128) for every exponent byte, 255 included: half, because the table is doubled."""
    table = torch.tensor(E2M1_DOUBLED, dtype=torch.int32)
    exponent = blocks[..., 0].int()
    # The float32 exponent field is e − 1; the two smallest powers are denormal.
    d = torch.where(exponent < 2, 1 << (21 + exponent), (exponent - 1) << 23).view(torch.float32)
    return IntegerBlocks(table[nibbles(blocks[..., 1:])], d, ones(blocks))
