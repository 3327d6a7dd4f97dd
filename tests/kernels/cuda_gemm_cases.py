"""Shared by tests of GEMM on a GPU."""

from pathlib import Path

import torch

from bench.kernels.machine_code import stack_bytes
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, SUM_SIZE, QuantActivations
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.cuda.gemm_tiles import Tiling
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.linear.integer_types import BLOCK_TYPES, activation_scale_size
from coldstream.kernels.quant_tensor import QuantTensor


def arch_of(tiling: Tiling, number: int) -> str:
    """One of two architectures, alternately; always the second where warpgroups multiply."""
    return "sm_90a" if tiling.by_warpgroups or number % 2 else "sm_80"


def check_instance(
    program: CudaProgram, quant_type: QuantType, kernel: str, arch: str, directory: Path
) -> None:
    """It is listed and compiles, for types with blocks below 256 without a stack. directory: a cache."""
    assert kernel in program.instances
    code = compile_instance(program.source, kernel, arch, directory)
    assert quant_type not in BLOCK_TYPES or stack_bytes(code) == 0


def padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """The last dimension filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % multiple))


def device_activations(x: torch.Tensor, quant_type: QuantType, device: str = "cuda") -> QuantActivations:
    """float32 x [T, K] quantised by the reference for a type of weights, on the device, in whole groups."""
    scale_size = activation_scale_size(quant_type)
    quantized = quantize_activations(x, scale_size)
    return QuantActivations(
        padded(quantized.q, GROUP_SIZE).to(device),
        padded(quantized.scales, GROUP_SIZE // scale_size).to(device),
        padded(quantized.sums, GROUP_SIZE // SUM_SIZE).to(device),
    )


def device_weight(tensor: QuantTensor, offset: int = 0) -> QuantTensor:
    """A copy on the device whose address is `offset` bytes past a multiple of 256."""
    data = tensor.blocks.reshape(-1)
    memory = torch.full((data.numel() + offset + 256,), 0xFF, dtype=torch.uint8, device="cuda")
    place = memory[offset : offset + data.numel()]
    place.copy_(data)
    return QuantTensor(place.view(tensor.blocks.shape), tensor.quant_type, tensor.shape)
