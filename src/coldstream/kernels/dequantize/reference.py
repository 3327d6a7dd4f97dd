"""The values of every GGUF tensor type in plain PyTorch, the reference of other implementations.

A quantised type is unpacked into integers and scales first (`IntegerBlocks`). Exact integer products start
from the same unpacked form, so that the meaning of bytes is written once.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize import unpack_grid, unpack_linear
from coldstream.kernels.dequantize.integer_blocks import IntegerBlocks, grouped
from coldstream.kernels.quant_tensor import QuantTensor

UNPACKERS: Mapping[QuantType, Callable[[torch.Tensor], IntegerBlocks]] = MappingProxyType(
    {
        QuantType.Q4_0: unpack_linear.unpack_q4_0,
        QuantType.Q4_1: unpack_linear.unpack_q4_1,
        QuantType.Q5_0: unpack_linear.unpack_q5_0,
        QuantType.Q5_1: unpack_linear.unpack_q5_1,
        QuantType.Q8_0: unpack_linear.unpack_q8_0,
        QuantType.Q2_K: unpack_linear.unpack_q2_k,
        QuantType.Q3_K: unpack_linear.unpack_q3_k,
        QuantType.Q4_K: unpack_linear.unpack_q4_k,
        QuantType.Q5_K: unpack_linear.unpack_q5_k,
        QuantType.Q6_K: unpack_linear.unpack_q6_k,
        QuantType.IQ2_XXS: unpack_grid.unpack_iq2_xxs,
        QuantType.IQ2_XS: unpack_grid.unpack_iq2_xs,
        QuantType.IQ3_XXS: unpack_grid.unpack_iq3_xxs,
        QuantType.IQ1_S: unpack_grid.unpack_iq1_s,
        QuantType.IQ4_NL: unpack_linear.unpack_iq4_nl,
        QuantType.IQ3_S: unpack_grid.unpack_iq3_s,
        QuantType.IQ2_S: unpack_grid.unpack_iq2_s,
        QuantType.IQ4_XS: unpack_linear.unpack_iq4_xs,
        QuantType.IQ1_M: unpack_grid.unpack_iq1_m,
        QuantType.TQ2_0: unpack_linear.unpack_tq2_0,
        QuantType.MXFP4: unpack_linear.unpack_mxfp4,
        QuantType.Q2_0: unpack_linear.unpack_q2_0,
    }
)
FLOAT_DTYPES: Mapping[QuantType, torch.dtype] = MappingProxyType(
    {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}
)


def unpack(tensor: QuantTensor) -> IntegerBlocks:
    """Integers and scales of a tensor [..., K]: n = 256, or n = 32 for types with smaller blocks, B = K / n.

    KeyError for float types.
    """
    blocks = grouped(tensor.blocks, -1, tensor.quant_type.block_bytes)
    return UNPACKERS[tensor.quant_type](blocks)


def dequantize(tensor: QuantTensor) -> torch.Tensor:
    """float32 values in the logical shape. NaN and infinite scales give what IEEE arithmetic gives."""
    dtype = FLOAT_DTYPES.get(tensor.quant_type)
    if dtype is None:
        return unpack(tensor).values()
    # A copy, because a view as a wider type would need an aligned address.
    blocks: torch.Tensor = tensor.blocks
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype).float()
