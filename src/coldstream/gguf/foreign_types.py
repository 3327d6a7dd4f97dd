"""Tensor types that files may have and this program does not read: what each is, and what to take instead.

Ids and names are those of ggml and of the programs that write the types. Ids from 133 to 158 belong to
ik_llama.cpp, 142 and 143 to PrismML's copy of llama.cpp. Where two programs use an id, the name here is that
of the files that people publish.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

_COMMON: Final = "a Q4_K_M, IQ4_XS or Q2_K file"


class ForeignType(NamedTuple):
    """A type's name, and why no product with it is here."""

    name: str
    reason: str
    instead: str = _COMMON


_REMOVED: Final = "a type that GGUF no longer has"
_NO_WEIGHT: Final = "a type that no weight of a model has"
_IK_LLAMA: Final = "a type of ik_llama.cpp alone"
_IK_LLAMA_NAMES: Final = {
    133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 136: "Q8_K64", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K",
    140: "IQ5_K", 141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS", 153: "IQ2_KT",
    154: "IQ3_KT", 155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip
_ROTATED: Final = "its products need the activations rotated first"

FOREIGN_TYPES: Mapping[int, ForeignType] = MappingProxyType(
    {
        **{type_id: ForeignType(name, _IK_LLAMA) for type_id, name in _IK_LLAMA_NAMES.items()},
        **{type_id: ForeignType(name, _REMOVED) for type_id, name in ((4, "Q4_2"), (5, "Q4_3"))},
        **{
            31 + i: ForeignType(f"Q4_0_{name}", _REMOVED, "a Q4_0 file")
            for i, name in enumerate(("4_4", "4_8", "8_8"))
        },
        **{
            36 + i: ForeignType(f"IQ4_NL_{name}", _REMOVED, "an IQ4_NL file")
            for i, name in enumerate(("4_4", "4_8", "8_8"))
        },
        9: ForeignType("Q8_1", _NO_WEIGHT, "a Q8_0 file"),
        15: ForeignType("Q8_K", _NO_WEIGHT, "a Q8_0 file"),
        **{
            24 + i: ForeignType(name, _NO_WEIGHT) for i, name in enumerate(("I8", "I16", "I32", "I64", "F64"))
        },
        34: ForeignType("TQ1_0", "no product here unpacks digits of base 3", "a TQ2_0 or Q2_0 file"),
        40: ForeignType(
            "NVFP4",
            "its scales are floats for 16 values, with factors in tensors beside the weights",
            "an MXFP4 or Q4_K_M file",
        ),
        41: ForeignType("Q1_0", "no product here has weights of one bit", "a Q2_0, IQ1_M or IQ2_XXS file"),
        142: ForeignType("PQ2_0", _ROTATED, "a Q2_0 file"),
        143: ForeignType("PTQ1_0", _ROTATED, "a Q2_0 file"),
    }
)


def refusal(type_id: int) -> str:
    """What is wrong with a tensor of a type that is not in `QuantType`, and the next step."""
    found = FOREIGN_TYPES.get(type_id)
    if found is None:
        problem = f"tensor type {type_id} is unknown, newer than this version or of another program"
        return f"{problem}: download {_COMMON} of this model"
    problem = f"tensor type {type_id} ({found.name}) is not supported, {found.reason}"
    return f"{problem}: download {found.instead} of this model"
