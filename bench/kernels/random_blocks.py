"""Random weights of every quantised type, with finite scales."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from coldstream.gguf.quant_types import QuantType

SCALE_PLACES: Mapping[QuantType, tuple[int, ...]] = MappingProxyType(
    {  # of a block's float16 scales, in bytes; of others 0
        QuantType.Q4_1: (0, 2),
        QuantType.Q5_1: (0, 2),
        QuantType.Q2_K: (80, 82),
        QuantType.Q3_K: (108,),
        QuantType.Q4_K: (0, 2),
        QuantType.Q5_K: (0, 2),
        QuantType.Q6_K: (208,),
        QuantType.TQ2_0: (64,),
        QuantType.IQ1_M: (),
        QuantType.MXFP4: (),
    }
)


def random_blocks(quant_type: QuantType, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Random bytes but for finite scales, of either sign where the type has one: uint8 [..., row bytes]."""
    rng = np.random.default_rng(seed)
    num_blocks = math.prod(shape) // quant_type.block_elements
    blocks = rng.integers(0, 256, (num_blocks, quant_type.block_bytes), dtype=np.uint8)
    for place in SCALE_PLACES.get(quant_type, (0,)):
        scales = rng.standard_normal(num_blocks).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    if quant_type == QuantType.IQ1_M:
        blocks[:, 55] &= 0xBF  # the top bit of the exponent, which is scattered over four bytes
    if quant_type == QuantType.MXFP4:
        blocks[:, 0] = rng.integers(100, 140, num_blocks)  # an exponent, plus 128
    return blocks.reshape(*shape[:-1], -1)
