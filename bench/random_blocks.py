"""Random rows of every quantised type, whose weights have a chosen spread.

All bytes of a block are random but for its float scales. Every pattern of the other bytes is legal in every
type, so a file of such rows costs what a trained one costs, and every program reads it.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from coldstream.gguf.quant_types import QuantType


@dataclass(frozen=True)
class Scale:
    """Where a block has its float16 scale d, and what values come of d = 1.

    A type with a float16 minimum has it at `minimum_at`; it is `minimum` · d, so that the values' mean is 0.
    """

    at: int  # byte of the block
    deviation: float  # standard deviation of the values for d = 1
    minimum_at: int | None = None
    minimum: float = 0.0


SCALES = {
    "Q4_0": Scale(0, 4.61),
    "Q4_1": Scale(0, 4.61, 2, -7.5),
    "Q5_0": Scale(0, 9.23),
    "Q5_1": Scale(0, 9.23, 2, -15.5),
    "Q8_0": Scale(0, 73.9),
    "Q2_K": Scale(80, 13.9, 82, 1.5),
    "Q3_K": Scale(108, 43.3),
    "Q4_K": Scale(0, 160.0, 2, 7.5),
    "Q5_K": Scale(0, 330.7, 2, 15.5),
    "Q6_K": Scale(208, 700.0),
    "IQ2_XXS": Scale(0, 53.3),
    "IQ2_XS": Scale(0, 55.7),
    "IQ2_S": Scale(0, 56.4),
    "IQ3_XXS": Scale(0, 142.8),
    "IQ3_S": Scale(0, 139.7),
    "IQ1_S": Scale(0, 7.23),
    "IQ4_NL": Scale(0, 67.2),
    "IQ4_XS": Scale(0, 1243.0),
    "TQ2_0": Scale(64, 1.0),
    "Q2_0": Scale(0, 1.0),
}
IQ1_M_DEVIATION = 7.18  # for d = 1
MXFP4_DEVIATION = 2.92  # for the exponent 127
TWO_BITS = {"Q2_0": slice(2, 18), "TQ2_0": slice(0, 64)}  # bytes of four codes that mean −1, 0, 1 and 2
TWO_BITS_SHARES = (0.4, 0.3, 0.2, 0.1)  # of each: the mean is 0 and the variance 1


def random_blocks(
    rng: np.random.Generator, qtype: QuantType, rows: int, cols: int, deviation: float | None = None
) -> np.ndarray:
    """Random rows of a quantised type [rows, row bytes], uint8, of weights with a standard deviation near
    `deviation`, which is 1/sqrt(cols) if not given. Raises ValueError for a type without a rule."""
    deviation = cols**-0.5 if deviation is None else deviation
    count = rows * qtype.row_bytes(cols) // qtype.block_bytes
    blocks = rng.integers(0, 256, (count, qtype.block_bytes), dtype=np.uint8)
    if qtype.name == "IQ1_M":
        _set_iq1_m_scale(blocks, deviation / IQ1_M_DEVIATION)
    elif qtype.name == "MXFP4":
        blocks[:, 0] = _exponents(rng, count, deviation / MXFP4_DEVIATION)
    elif qtype.name in SCALES:
        _fill(rng, qtype, blocks)
        _set_scale(blocks, SCALES[qtype.name], deviation)
    else:
        raise ValueError(f"no random blocks for {qtype.name}")
    return blocks.reshape(rows, -1)


def _fill(rng: np.random.Generator, qtype: QuantType, blocks: np.ndarray) -> None:
    """Draws the fields that are not uniform."""
    if qtype.name == "Q6_K":
        blocks[:, 192:208] = rng.integers(-64, 64, (len(blocks), 16), dtype=np.int8).view(np.uint8)
    if qtype.name in TWO_BITS:
        codes = blocks[:, TWO_BITS[qtype.name]]
        low, high = _pairs_of_codes()[rng.integers(0, 1 << 16, (2, *codes.shape), dtype=np.uint16)]
        codes[:] = low | high << 4


@cache
def _pairs_of_codes() -> np.ndarray:
    """Two codes of two bits, with their shares of 16 random bits: uint8 [65536]."""
    limits = np.rint(256 * np.cumsum(TWO_BITS_SHARES[:-1]))
    code = np.searchsorted(limits, np.arange(256), side="right").astype(np.uint8)
    return (code | code[:, None] << 2).ravel()


def _set_scale(blocks: np.ndarray, scale: Scale, deviation: float) -> None:
    d = deviation / scale.deviation
    blocks[:, scale.at : scale.at + 2] = _half(d)
    if scale.minimum_at is not None:
        blocks[:, scale.minimum_at : scale.minimum_at + 2] = _half(d * scale.minimum)


def _half(value: float) -> np.ndarray:
    """The two bytes of a float16."""
    return np.float16(value).reshape(1).view(np.uint8)


def _set_iq1_m_scale(blocks: np.ndarray, d: float) -> None:
    """The bits of d are the highest four of each of four words."""
    bits = int(np.float16(d).view(np.uint16))
    for word in range(4):
        high = 48 + 2 * word + 1
        blocks[:, high] = (blocks[:, high] & 15) | ((bits >> (4 * word)) & 15) << 4


def _exponents(rng: np.random.Generator, count: int, factor: float) -> np.ndarray:
    """Exponents of two neighbouring powers of 2, drawn so that their mean square is `factor`²: uint8."""
    low = int(np.floor(np.log2(factor)))
    share_of_high = ((factor / 2.0**low) ** 2 - 1) / 3
    return (127 + low + (rng.random(count) < share_of_high)).astype(np.uint8)
