"""The numbers of GGUF's tensor types as the GPU's kernels read them: the text of `<quant_types.cuh>`."""

from coldstream.gguf.quant_types import QuantType

HEADER = "quant_types.cuh"


def types_header() -> str:
    """An enumeration with the names of `QuantType` in lower case."""
    numbers = ", ".join(f"{each.name.lower()} = {each.value}" for each in QuantType)
    return "\n".join(["#pragma once", "namespace coldstream {", f"enum QuantType {{{numbers}}};", "}", ""])
