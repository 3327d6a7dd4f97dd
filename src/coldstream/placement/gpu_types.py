"""What a GPU takes for products of each type of weights, over its time for as many weights of Q4_K.

A type is bound by its bytes or by the instructions that unpack its codes, and kernels of dense products and
of routed experts unpack in different ways. Float types are multiplied as float32, without tensor cores. The
numbers are from docs/results/gpu/types.json and float_types.json, an H200's. `bench.kernels.gpu_type_table`
writes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coldstream.gguf.quant_types import QuantType


@dataclass(frozen=True)
class ProductTime:
    """Over that of as many weights of MEASURED_TYPE: of one row, and of a prompt's 2,048 rows."""

    row: float  # of a dense matrix
    experts_row: float  # of routed experts
    prompt: float
    experts_prompt: float


GPU_TIMES: Final[Mapping[QuantType, ProductTime]] = {
    QuantType.F32: ProductTime(5.26, 5.26, 6.19, 6.19),
    QuantType.F16: ProductTime(4.10, 4.10, 6.50, 6.50),
    QuantType.Q4_0: ProductTime(1.17, 1.17, 1.20, 1.25),
    QuantType.Q4_1: ProductTime(1.16, 1.20, 1.62, 1.57),
    QuantType.Q5_0: ProductTime(1.34, 1.33, 1.27, 1.32),
    QuantType.Q5_1: ProductTime(1.36, 1.31, 1.60, 1.54),
    QuantType.Q8_0: ProductTime(1.76, 1.47, 1.25, 1.31),
    QuantType.Q2_K: ProductTime(0.94, 0.92, 0.77, 0.93),
    QuantType.Q3_K: ProductTime(1.24, 1.17, 0.98, 1.15),
    QuantType.Q4_K: ProductTime(1.00, 1.00, 1.00, 1.00),
    QuantType.Q5_K: ProductTime(1.30, 1.12, 1.02, 1.10),
    QuantType.Q6_K: ProductTime(1.45, 1.36, 1.07, 1.25),
    QuantType.IQ2_XXS: ProductTime(1.04, 1.13, 1.10, 1.21),
    QuantType.IQ2_XS: ProductTime(1.07, 1.18, 1.05, 1.20),
    QuantType.IQ3_XXS: ProductTime(1.32, 1.28, 1.16, 1.26),
    QuantType.IQ1_S: ProductTime(0.97, 1.16, 0.87, 1.02),
    QuantType.IQ4_NL: ProductTime(1.22, 1.21, 1.25, 1.29),
    QuantType.IQ3_S: ProductTime(1.36, 1.44, 1.08, 1.23),
    QuantType.IQ2_S: ProductTime(1.11, 1.23, 1.23, 1.34),
    QuantType.IQ4_XS: ProductTime(1.20, 1.11, 1.13, 1.27),
    QuantType.IQ1_M: ProductTime(0.97, 1.11, 0.99, 1.13),
    QuantType.BF16: ProductTime(4.43, 4.43, 6.51, 6.51),
    QuantType.TQ2_0: ProductTime(0.92, 0.96, 0.66, 0.84),
    QuantType.MXFP4: ProductTime(1.22, 1.25, 1.30, 1.32),
    QuantType.Q2_0: ProductTime(1.02, 1.15, 1.24, 1.27),
}
