"""Quantised blocks of given values, in any type: by llama.cpp's quantiser, or by a type's definition."""

import numpy as np

from bench.quantise_q2_0 import q2_0_blocks
from coldstream.gguf.quant_types import QuantType
from tools import llama_cpp

NOT_IN_LLAMA_CPP = frozenset({QuantType.Q2_0})  # of the `xllamacpp` package


def quantize(values: np.ndarray, quant_type: QuantType) -> np.ndarray:
    """Blocks uint8 [..., row_bytes] of float32 values [..., columns]."""
    return (
        q2_0_blocks(values) if quant_type == QuantType.Q2_0 else llama_cpp.quantize(values, int(quant_type))
    )
