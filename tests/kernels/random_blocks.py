"""Random weights of every type, and activations, for kernel tests."""

import numpy as np
import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize.reference import FLOAT_DTYPES
from coldstream.kernels.quant_tensor import QuantTensor

FLOAT16_PLACES = {
    QuantType.Q4_1: (0, 2),
    QuantType.Q5_1: (0, 2),
    QuantType.Q4_K: (0, 2),
    QuantType.Q5_K: (0, 2),
    QuantType.Q2_K: (80, 82),
    QuantType.Q3_K: (108,),
    QuantType.Q6_K: (208,),
    QuantType.TQ2_0: (64,),
    QuantType.F32: (),
    QuantType.BF16: (),
    QuantType.IQ1_M: (),
    QuantType.MXFP4: (),
}


def float16_places(quant_type: QuantType) -> tuple[int, ...]:
    """Byte offsets of the float16 scales in a block; IQ1_M scatters its scale and counts as having none."""
    return FLOAT16_PLACES.get(quant_type, (0,))


def random_weight(quant_type: QuantType, shape: tuple[int, ...], seed: int) -> QuantTensor:
    """Random values or blocks of `shape`, with scales between 0.001 and 0.01."""
    generator = np.random.default_rng(seed)
    if quant_type in FLOAT_DTYPES:
        values = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
        return QuantTensor(values.to(FLOAT_DTYPES[quant_type]).view(torch.uint8), quant_type, shape)
    num_blocks = shape[-1] // quant_type.block_elements
    blocks = generator.integers(0, 256, (*shape[:-1], num_blocks, quant_type.block_bytes), dtype=np.uint8)
    for place in float16_places(quant_type):
        scales = generator.uniform(0.001, 0.01, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., np.newaxis].view(np.uint8)
    if quant_type == QuantType.IQ1_M:
        blocks[..., 55] = 0x20  # the top bits of a small scale
        blocks[..., 53] &= 0x7F
    if quant_type == QuantType.MXFP4:
        blocks[..., 0] = generator.integers(118, 122, blocks.shape[:-1])
    return QuantTensor.from_bytes(torch.from_numpy(blocks), quant_type, shape)


def extreme_weight(quant_type: QuantType, cols: int) -> QuantTensor:
    """A row [cols] of each of some bytes, with random scales: the greatest and least codes and sub-scales."""
    fills = (0x00, 0xFF, 0x7F, 0x80, 0xF0, 0x0F)
    weight = random_weight(quant_type, (len(fills), cols), seed=cols)
    blocks = weight.blocks.view(len(fills), -1, quant_type.block_bytes)
    kept = blocks.clone()
    for row, fill in zip(blocks, fills, strict=True):
        row.fill_(fill)
    for place in float16_places(quant_type):
        blocks[..., place : place + 2] = kept[..., place : place + 2]
    if quant_type == QuantType.IQ1_M:
        blocks[..., 55] &= 0x2F  # a finite scale
    if quant_type == QuantType.MXFP4:
        blocks[..., 0] = kept[..., 0]
    return weight


def activations(seed: int, rows: int, cols: int) -> torch.Tensor:
    """float32 [rows, cols] with outliers, rounding ties, a stretch of zeros and one of tiny values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols), dtype=np.float32)
    x *= np.where(rng.random((rows, cols)) < 0.01, np.float32(50), np.float32(1))
    x[::3, : cols // 2] = np.round(x[::3, : cols // 2] * 2) / 2
    x[1::4, :32] = 0
    x[2::4, -32:] *= np.float32(1e-37)
    return torch.from_numpy(x)
