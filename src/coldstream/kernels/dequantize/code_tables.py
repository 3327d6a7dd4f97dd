"""The tables of values for codes of some types, as the GPU's kernels read them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize import grids, unpack_linear

TABLES: Mapping[QuantType, Callable[[], torch.Tensor]] = MappingProxyType(
    {
        QuantType.IQ1_S: grids.iq1_grid,
        QuantType.IQ1_M: grids.iq1_grid,
        QuantType.IQ2_XXS: grids.iq2_xxs_grid,
        QuantType.IQ2_XS: grids.iq2_xs_grid,
        QuantType.IQ2_S: grids.iq2_s_grid,
        QuantType.IQ3_XXS: grids.iq3_xxs_grid,
        QuantType.IQ3_S: grids.iq3_s_grid,
        QuantType.IQ4_NL: lambda: torch.tensor(unpack_linear.IQ4_VALUES),
        QuantType.IQ4_XS: lambda: torch.tensor(unpack_linear.IQ4_VALUES),
        QuantType.MXFP4: lambda: torch.tensor(unpack_linear.E2M1_DOUBLED),
    }
)


def code_table(quant_type: QuantType) -> torch.Tensor | None:
    """The int8 table of a type, the entries of a grid in order; None for types without one."""
    table = TABLES.get(quant_type)
    return None if table is None else table().flatten().to(torch.int8)
