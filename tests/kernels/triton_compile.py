"""Compiles the Triton kernels for the compute capability in argv[1], with no GPU; a program of its own.

Prints one line per kernel: its name and its bytes of shared memory. Launches become compilations because the
active driver only knows a target.
"""

import sys
from typing import Any

import torch
from random_blocks import random_weight
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.dequantize.triton import dequantize
from coldstream.kernels.dequantize.triton_blocks import code_table
from coldstream.kernels.experts.triton import ExpertMatrices, experts_down, experts_gate_up
from coldstream.kernels.experts.triton_groups import (
    PairGroups,
    experts_gate_up_grouped,
    group_pairs,
    max_tiles,
)
from coldstream.kernels.linear.reference import INTEGER_TYPES
from coldstream.kernels.linear.triton import linear, linear_float
from coldstream.kernels.quantize.triton import quantize

CPU = torch.device("cpu")
FLOATS = (QuantType.F32, QuantType.F16, QuantType.BF16)


class TargetOnly:
    """The part of a driver that the compiler asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_instead(kernel: Any, grid: Any) -> Any:
    """What `kernel[grid]` returns here."""

    def compile_kernel(*args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        assert len(compiled.asm["cubin"]) > 0
        assert "fma.rn.ftz" not in compiled.asm["ptx"], f"{kernel.__name__} flushes subnormals"
        assert "ld.local" not in compiled.asm["ptx"], f"{kernel.__name__} indexes local memory"
        print(kernel.__name__, compiled.metadata.shared)

    return compile_kernel


def main() -> None:
    driver.set_active(TargetOnly(int(sys.argv[1])))
    JITFunction.__getitem__ = compile_instead
    for quant_type in (QuantType.Q4_K, QuantType.IQ2_XXS, QuantType.IQ1_M):
        weight = random_weight(quant_type, (4, 512), 1)
        dequantize(weight, torch.zeros(4, 512), code_table(quant_type, CPU))
    x = torch.randn(16, 512)
    quantize(x, quantize_activations(x))
    for quant_type in (*INTEGER_TYPES, *FLOATS):
        weight, out = random_weight(quant_type, (64, 512), 1), torch.zeros(16, 64)
        if quant_type in FLOATS:
            linear_float(x, weight, out)
        else:
            linear(quantize_activations(x[:1]), weight, out[:1])
            linear(quantize_activations(x), weight, out)
    addresses = torch.zeros(4, dtype=torch.int64)
    gate = ExpertMatrices(addresses, QuantType.Q4_K, 512, 512)
    down = ExpertMatrices(addresses, QuantType.Q6_K, 512, 512)
    ids, hidden, out = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(8, 512), torch.zeros(1, 8, 512)
    sizes = ((4,), (8,), (max_tiles(8, 4), 3), (1,))
    groups = PairGroups(16, *(torch.zeros(size, dtype=torch.int32) for size in sizes))
    experts_gate_up(quantize_activations(x[:1]), ids, gate, gate, hidden)
    experts_down(quantize_activations(hidden), ids, down, out)
    group_pairs(ids, gate, gate, down, groups)
    experts_gate_up_grouped(quantize_activations(x[:1]), 8, gate, gate, groups, hidden)


if __name__ == "__main__":
    main()
