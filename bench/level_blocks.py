"""Rows of 256 chosen values in the types that tables of the full-size file have.

A value has one of sixteen levels: it is (level − 7.5) · step. Types with fewer or uneven codes come as near
as they can.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from coldstream.gguf.quant_types import QuantType

ROW = 256  # values: all blocks of the types below divide it
# The code of IQ4_XS that is nearest to each level, for values of (level − 7.5) · 16.
IQ4_CODES = np.array([0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 15], np.uint8)


def level_blocks(qtype: QuantType, levels: np.ndarray, step: float, num_zero: int = 0) -> np.ndarray:
    """Blocks uint8 [rows, bytes of 256 values] of levels uint8 [rows, 256].

    The first `num_zero` values are 0, a multiple of 32, in Q6_K and Q8_0. Raises ValueError for other types.
    """
    if qtype not in WRITERS or (num_zero and qtype not in (QuantType.Q6_K, QuantType.Q8_0)):
        raise ValueError(f"no table with {num_zero} zeros a row in {qtype.name}")
    return WRITERS[qtype](levels, step, num_zero)


def _half(value: float) -> np.ndarray:
    return np.float16(value).reshape(1).view(np.uint8)


def _q2_k(levels: np.ndarray, step: float, _: int) -> np.ndarray:
    """The levels by fours: scales 8 and minimums 12 of d = dmin = step / 2 give steps of 4 · step from −6."""
    blocks = np.empty((len(levels), 84), np.uint8)
    blocks[:, :16] = 8 | 12 << 4
    quarters = (levels >> 2).reshape(-1, 2, 4, 32)
    blocks[:, 16:80] = _four_of_two_bits(quarters)
    blocks[:, 80:82] = blocks[:, 82:84] = _half(step / 2)
    return blocks


def _q4_k(levels: np.ndarray, step: float, _: int) -> np.ndarray:
    blocks = np.empty((len(levels), 144), np.uint8)
    blocks[:, 0:2] = _half(step / 32)
    blocks[:, 2:4] = _half(step * 7.5 / 32)
    blocks[:, 4:12] = 32 | 2 << 6  # with the next four: all sub-blocks have scale and minimum 32
    blocks[:, 12:16] = 0
    low, high = levels.reshape(-1, 4, 2, 32).transpose(2, 0, 1, 3)
    blocks[:, 16:] = (low | high << 4).reshape(-1, 128)
    return blocks


def _q6_k(levels: np.ndarray, step: float, num_zero: int) -> np.ndarray:
    blocks = np.empty((len(levels), 210), np.uint8)
    codes = (17 + 2 * levels).reshape(-1, 2, 128)  # the value is d · scale · (code − 32)
    low, high = codes & 15, codes >> 4
    blocks[:, :128] = (low[:, :, :64] | low[:, :, 64:] << 4).reshape(-1, 128)
    blocks[:, 128:192] = _four_of_two_bits(high.reshape(-1, 2, 4, 32))
    blocks[:, 192:208] = np.where(np.arange(16) < num_zero // 16, 0, 32)
    blocks[:, 208:210] = _half(step / 64)
    return blocks


def _q8_0(levels: np.ndarray, step: float, num_zero: int) -> np.ndarray:
    codes = 2 * levels.astype(np.int8) - 15
    codes[:, :num_zero] = 0
    blocks = np.empty((len(levels), 8, 34), np.uint8)
    blocks[:, :, 0:2] = _half(step / 2)
    blocks[:, :, 2:] = codes.view(np.uint8).reshape(-1, 8, 32)
    return blocks.reshape(-1, 8 * 34)


def _iq4_xs(levels: np.ndarray, step: float, _: int) -> np.ndarray:
    blocks = np.empty((len(levels), 136), np.uint8)
    blocks[:, 0:2] = _half(step / 16)
    blocks[:, 2:4], blocks[:, 4:8] = 0xAA, 0x11  # all sub-blocks have the scale 33 − 32
    low, high = IQ4_CODES[levels].reshape(-1, 8, 2, 16).transpose(2, 0, 1, 3)
    blocks[:, 8:] = (low | high << 4).reshape(-1, 128)
    return blocks


def _four_of_two_bits(values: np.ndarray) -> np.ndarray:
    """uint8 [rows, 64] of values below 4 [rows, 2, 4, 32]: the four of a byte are 32 apart."""
    return (values[:, :, 0] | values[:, :, 1] << 2 | values[:, :, 2] << 4 | values[:, :, 3] << 6).reshape(
        -1, 64
    )


WRITERS: Mapping[QuantType, Callable[[np.ndarray, float, int], np.ndarray]] = MappingProxyType(
    {
        QuantType.Q2_K: _q2_k,
        QuantType.Q4_K: _q4_k,
        QuantType.Q6_K: _q6_k,
        QuantType.Q8_0: _q8_0,
        QuantType.IQ4_XS: _iq4_xs,
    }
)
