"""The grids of the IQ types as the GPU's kernels read them: the text of `<grids.cuh>`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from coldstream.kernels.dequantize import grids

HEADER = "grids.cuh"
VALUES = 4  # of an entry
GRIDS: Mapping[str, tuple[Callable[[], grids.Grid], tuple[int, ...]]] = MappingProxyType(
    {
        "iq1_grid": (grids.iq1_grid, grids.IQ1_LEVELS),
        "iq2_xxs_grid": (grids.iq2_xxs_grid, grids.IQ2_LEVELS),
        "iq2_xs_grid": (grids.iq2_xs_grid, grids.IQ2_LEVELS),
        "iq2_s_grid": (grids.iq2_s_grid, grids.IQ2_LEVELS),
        "iq3_xxs_grid": (grids.iq3_xxs_grid, grids.IQ3_XXS_LEVELS),
        "iq3_s_grid": (grids.iq3_s_grid, grids.IQ3_S_LEVELS),
    }
)


def grids_header() -> str:
    """Arrays of uint16: each four values of a grid, as numbers of levels in nibbles, lowest first."""
    lines = ["#pragma once", '#include "cuda/common.cuh"', "namespace coldstream {"]
    for name, (grid, levels) in GRIDS.items():
        numbers = np.searchsorted(np.array(levels), grid().reshape(-1, VALUES))
        entries = (numbers << np.arange(0, 4 * VALUES, 4)).sum(axis=-1).tolist()
        text = ",".join(map(str, entries))
        lines.append(f"__device__ alignas(4) const uint16_t {name}[{len(entries)}] = {{{text}}};")
    return "\n".join([*lines, "}", ""])
