"""Quantised blocks of given values, in any type: by llama.cpp's quantiser, or by a type's definition."""

import numpy as np

from coldstream.gguf.quant_types import QuantType
from tools import llama_cpp

NOT_IN_LLAMA_CPP = frozenset({QuantType.Q2_0})  # of the `xllamacpp` package


def quantize(values: np.ndarray, quant_type: QuantType) -> np.ndarray:
    """Blocks uint8 [..., row_bytes] of float32 values [..., columns]."""
    return (
        q2_0_blocks(values) if quant_type == QuantType.Q2_0 else llama_cpp.quantize(values, int(quant_type))
    )


def q2_0_blocks(values: np.ndarray) -> np.ndarray:
    """Blocks of Q2_0: uint8 [..., columns / 64 · 18].

    The scale is the root of a block's mean square, so that the codes −1, 0 and 1 are about as frequent.
    """
    groups = values.reshape(-1, 64).astype(np.float32)
    d = np.sqrt((groups**2).mean(-1, keepdims=True)).astype(np.float16)
    codes = np.clip(np.round(groups / np.where(d > 0, d, 1)), -1, 2).astype(np.uint8) + np.uint8(1)
    packed = (codes.reshape(-1, 16, 4) << np.arange(0, 8, 2, dtype=np.uint8)).sum(-1).astype(np.uint8)
    blocks: np.ndarray = np.concatenate([d.view(np.uint8), packed], axis=-1)
    return blocks.reshape(*values.shape[:-1], -1)
