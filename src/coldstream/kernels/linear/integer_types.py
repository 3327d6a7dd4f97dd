"""Classes of weight types: what unpacks to integers, in which blocks, and with which activations' scales."""

from typing import Final

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE

INTEGER_TYPES: Final = frozenset(kind for kind in QuantType if kind.block_elements > 1)
BLOCK_TYPES: Final = frozenset(kind for kind in INTEGER_TYPES if kind.block_elements < GROUP_SIZE)
# Types whose blocks have minima beside their scales.
MINIMUM_TYPES: Final = frozenset(
    {QuantType.Q4_1, QuantType.Q5_1, QuantType.Q2_K, QuantType.Q4_K, QuantType.Q5_K}
)


def activation_scale_size(quant_type: QuantType) -> int:
    """How many inputs share a scale in products with weights of an integer type: 256 or 32."""
    return BLOCK_SIZE if quant_type in BLOCK_TYPES else GROUP_SIZE
