"""What a GPU takes for products of each type of weights, over its time for as many weights of Q4_K.

A type is bound by its bytes or by the instructions that unpack its codes. The numbers are means of dense
products and routed experts on an H200, from docs/results/gpu/types.json (`bench.kernels.gpu_types`). Float
types are bound by bytes in one row, and in prompts by multiplications of float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coldstream.gguf.quant_types import QuantType

MEASURED_TYPE: Final = QuantType.Q4_K  # to which others are compared


@dataclass(frozen=True)
class ProductTime:
    """Over that of as many weights of MEASURED_TYPE."""

    one_row: float
    prompt: float  # of 2,048 rows


GPU_TIMES: Final[Mapping[QuantType, ProductTime]] = {
    QuantType.Q4_0: ProductTime(1.17, 1.23),
    QuantType.Q4_1: ProductTime(1.18, 1.60),
    QuantType.Q5_0: ProductTime(1.33, 1.30),
    QuantType.Q5_1: ProductTime(1.38, 1.57),
    QuantType.Q8_0: ProductTime(1.61, 1.28),
    QuantType.Q2_K: ProductTime(0.93, 0.85),
    QuantType.Q3_K: ProductTime(1.22, 1.06),
    QuantType.Q4_K: ProductTime(1.00, 1.00),
    QuantType.Q5_K: ProductTime(1.21, 1.06),
    QuantType.Q6_K: ProductTime(1.40, 1.16),
    QuantType.IQ2_XXS: ProductTime(1.08, 1.15),
    QuantType.IQ2_XS: ProductTime(1.18, 1.12),
    QuantType.IQ3_XXS: ProductTime(1.31, 1.21),
    QuantType.IQ1_S: ProductTime(1.07, 0.95),
    QuantType.IQ4_NL: ProductTime(1.27, 1.27),
    QuantType.IQ3_S: ProductTime(1.42, 1.16),
    QuantType.IQ2_S: ProductTime(1.19, 1.29),
    QuantType.IQ4_XS: ProductTime(1.15, 1.20),
    QuantType.IQ1_M: ProductTime(1.06, 1.06),
    QuantType.TQ2_0: ProductTime(0.94, 0.75),
    QuantType.MXFP4: ProductTime(1.25, 1.31),
    QuantType.Q2_0: ProductTime(1.09, 1.25),
}
FLOAT_PROMPT: Final = 5.0  # of float types in a prompt


def product_time(quant_type: QuantType) -> ProductTime:
    """Of any type."""
    if quant_type in GPU_TIMES:
        return GPU_TIMES[quant_type]
    values = MEASURED_TYPE.block_elements
    return ProductTime(quant_type.row_bytes(values) / MEASURED_TYPE.row_bytes(values), FLOAT_PROMPT)
