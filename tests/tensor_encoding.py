"""Values of tiny models as the blocks of a GGUF file."""

import math

import numpy as np

import gguf
from bench.quantise_q2_0 import q2_0_blocks
from gguf import GGMLQuantizationType as GgmlType

# For types that are filled with random blocks: byte offset → factor of each float16 scale within a block. The
# factor of a minimum is the mean of the codes that it shifts, so that the values are centred on 0.
_SCALES = {
    "Q2_K": {80: 1.0, 82: 1.5}, "Q3_K": {108: 1.0}, "Q4_K": {0: 1.0, 2: 7.5}, "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0}, "IQ1_S": {0: 1.0}, "IQ2_XXS": {0: 1.0}, "IQ2_XS": {0: 1.0}, "IQ2_S": {0: 1.0},
    "IQ3_XXS": {0: 1.0}, "IQ3_S": {0: 1.0}, "IQ4_NL": {0: 1.0}, "IQ4_XS": {0: 1.0},
}  # fmt: skip


def encode(values: np.ndarray, type_name: str, rng: np.random.Generator) -> np.ndarray:
    """Blocks of `type_name` for float32 `values`: uint8 [..., row bytes], or float32 / float16 as they are.

    Types that the `gguf` package can't encode get random blocks whose values have the same standard
    deviation.
    """
    if type_name == "F32":
        return values
    if type_name == "F16":
        return values.astype(np.float16)
    if type_name == "Q2_0":
        return q2_0_blocks(values)
    raw_type = GgmlType[type_name]
    if type_name not in _SCALES and type_name not in ("IQ1_M", "MXFP4"):
        return gguf.quantize(_in_long_rows(values), raw_type).reshape(*values.shape[:-1], -1)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[raw_type]
    blocks = rng.integers(0, 256, (values.size // elements, num_bytes), np.uint8)
    _set_scales(blocks, type_name, 1.0)
    spread = float(gguf.dequantize(_in_long_rows(blocks), raw_type).std())
    _set_scales(blocks, type_name, float(values.std()) / spread)
    return blocks.reshape(*values.shape[:-1], -1)


def _in_long_rows(values: np.ndarray) -> np.ndarray:
    """The same with several rows as one, still whole blocks: the `gguf` package takes 16 rows at a time."""
    rows = values.reshape(-1, values.shape[-1])
    return rows.reshape(math.gcd(len(rows), 16), -1)


def _set_scales(blocks: np.ndarray, type_name: str, scale: float) -> None:
    """Overwrites the scales of random blocks (uint8 [blocks, bytes]), to which values are proportional."""
    if type_name == "MXFP4":
        blocks[:, 0] = 127 + round(np.log2(scale))
        return
    if type_name == "IQ1_M":  # the four nibbles of the scale are the upper ones of four 16-bit words
        bits = int(np.float16(scale).view(np.uint16))
        for i in range(4):
            blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 0x0F) | (bits >> 4 * i & 0x0F) << 4
        return
    for offset, factor in _SCALES[type_name].items():
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale * factor).tobytes(), np.uint8)
