"""The eight levels of `i3`, and how their codes lie in bytes."""

from itertools import pairwise

import torch

from coldstream.kernels.attention.levels import (
    LARGEST_LEVEL,
    LEVELS,
    THRESHOLDS,
    pack_levels,
    round_levels,
    unpack_levels,
)


def test_levels_are_the_best_ones_for_a_normal_variable() -> None:
    # Max, "Quantizing for minimum distortion", 1960, table I, eight levels.
    best = torch.tensor([0.2451, 0.7560, 1.3439, 2.1520])
    assert (torch.tensor(LEVELS[:4]) / 53 - best).abs().max() < 0.005
    assert [(low + high) / 2 for low, high in pairwise(LEVELS[:4])] == list(THRESHOLDS)
    assert [-level for level in LEVELS[:4]] == list(LEVELS[4:])


def test_ties_go_to_the_greater_magnitude_and_zeros_to_a_positive_level() -> None:
    found = round_levels(torch.tensor([LARGEST_LEVEL, 26.5, -26.5, 92.5, 0.0, -1.0]))
    assert found.scale == 1
    assert found.codes.tolist() == [114, 40, -40, 114, 13, -13]


def test_bytes_are_low_bits_of_all_blocks_then_high_bits() -> None:
    random = torch.Generator().manual_seed(5)
    levels = torch.tensor(LEVELS)[torch.randint(8, (96,), generator=random)]
    packed = pack_levels(levels)
    assert packed.shape == (36,)
    assert torch.equal(unpack_levels(packed), levels.to(torch.int8))
    low, high = packed[:24].view(torch.int32), packed[24:].view(torch.int32)
    for i in range(96):
        block, part, nibble = i // 32, i % 32 // 8, i % 8
        code = int(low[2 * block + part // 2]) >> 4 * nibble + 2 * (part % 2) & 3
        code |= (int(high[block]) >> 4 * nibble + part & 1) << 2
        assert LEVELS[code] == levels[i]
