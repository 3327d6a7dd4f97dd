"""What GPUs of a compute capability offer to kernels: the one place that decides it.

Kernels see it as macros (`Features.options`), launchers as `DeviceLimits`. How much shared memory a device
has, the driver says.
"""

import re
from dataclasses import dataclass
from typing import Final

Capability = tuple[int, int]

TURING: Final = (7, 5)
AMPERE: Final = (8, 0)
HOPPER: Final = (9, 0)


@dataclass(frozen=True)
class Features:
    """Instructions that kernels have two forms for, or that only some kernels use."""

    has_wide_products: bool  # of 16 × 32 by 32 × 8 bytes; otherwise of 8 × 16 by 16 × 8
    has_async_copies: bool  # from global to shared memory, and barriers there that wait for them
    has_lane_reductions: bool  # of integers over a warp, in one instruction
    has_clusters: bool  # blocks that write into each other's shared memory, and waits without polling
    has_overlap: bool  # launches that begin before the one in front has ended
    has_warpgroups: bool  # products of four warps

    @classmethod
    def of(cls, capability: Capability) -> "Features":
        """Those of a device."""
        is_ampere, is_hopper = capability >= AMPERE, capability >= HOPPER
        return cls(
            has_wide_products=is_ampere,
            has_async_copies=is_ampere,
            has_lane_reductions=is_ampere,
            has_clusters=is_hopper,
            has_overlap=is_hopper,
            has_warpgroups=capability == HOPPER,
        )

    @property
    def options(self) -> tuple[str, ...]:
        """For the compiler: macros that are 0 or 1. Kernels for warpgroups are instances of their own."""
        macros = {
            "WIDE_PRODUCTS": self.has_wide_products,
            "ASYNC_COPIES": self.has_async_copies,
            "LANE_REDUCTIONS": self.has_lane_reductions,
            "CLUSTERS": self.has_clusters,
            "OVERLAP": self.has_overlap,
        }
        return tuple(f"-DCOLDSTREAM_{name}={int(value)}" for name, value in macros.items())


def architecture_of(capability: Capability) -> str:
    """The compiler's name of a device's architecture, with all its instructions."""
    major, minor = capability
    return f"sm_{major}{minor}" + "a" * Features.of(capability).has_warpgroups


def features_for(arch: str) -> Features:
    """Those of an architecture by the compiler's name, for example sm_90a. ValueError for another."""
    if (found := re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", arch)) is None:
        raise ValueError(f"{arch} is no architecture of a GPU: they are named as sm_90 is")
    return Features.of((int(found[1]), int(found[2])))
