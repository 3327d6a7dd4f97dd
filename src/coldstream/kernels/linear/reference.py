"""Matrix products: the plain one, which can be differentiated, and the exact one of docs/arithmetic.md."""

import torch

from coldstream.kernels.arithmetic.quantised import SUM_SIZE, QuantActivations
from coldstream.kernels.arithmetic.reference import dot_lanes, fma, quantize_activations, sum_of_eight
from coldstream.kernels.dequantize.integer_blocks import IntegerBlocks, grouped
from coldstream.kernels.dequantize.reference import dequantize, unpack
from coldstream.kernels.linear.integer_types import INTEGER_TYPES, activation_scale_size
from coldstream.kernels.quant_tensor import QuantTensor

NUM_BLOCK_LANES = 8


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K]: [T, N]. Differentiable."""
    return x @ weight.T


def linear_exact(x: torch.Tensor, weight: QuantTensor) -> torch.Tensor:
    """float32 x [T, K] times a weight [N, K] of any type, every bit as docs/arithmetic.md has it: [T, N]."""
    if weight.quant_type in INTEGER_TYPES:
        scale_size = activation_scale_size(weight.quant_type)
        return integer_product(quantize_activations(x, scale_size), unpack(weight))
    return dot_lanes(x, dequantize(weight))


def integer_product(x: QuantActivations, weight: IntegerBlocks) -> torch.Tensor:
    """Activations with a scale for each n inputs, T rows, times unpacked blocks [N, B, n]: float32 [T, N]."""
    num_rows, num_blocks, block_size = weight.codes.shape
    num_sub_blocks = weight.scales.shape[-1]
    scaled_codes = grouped(weight.codes, num_sub_blocks, -1) * weight.scales.unsqueeze(-1)
    # Sums of integers below 2^53 are exact in float64, whatever their order.
    products = torch.einsum(
        "tbi,nbi->btn", grouped(x.q, num_blocks, block_size).double(), scaled_codes.flatten(-2).double()
    ).float()
    sums_per_sub_block = block_size // num_sub_blocks // SUM_SIZE
    sums = grouped(x.sums.double(), num_blocks, num_sub_blocks, sums_per_sub_block).sum(dim=-1)  # [T, B, S]
    lanes = [torch.zeros(x.q.shape[0], num_rows) for _ in range(NUM_BLOCK_LANES)]
    for block in range(num_blocks):
        lane, scale = block % NUM_BLOCK_LANES, x.scales[:, block : block + 1]
        lanes[lane] = fma(weight.d[:, block] * scale, products[block], lanes[lane])
        if weight.dmin is not None and weight.mins is not None:
            offsets = (sums[:, block] @ weight.mins[:, block].double().T).float()
            lanes[lane] = fma(-(weight.dmin[:, block] * scale), offsets, lanes[lane])
    return sum_of_eight(torch.stack(lanes, dim=-1))
