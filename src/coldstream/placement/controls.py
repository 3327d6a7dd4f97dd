"""What moves while a model runs, by what its steps took. Pure.

A plan says where everything begins. No token depends on what moves.
"""

from dataclasses import dataclass
from typing import Self

from coldstream.placement.hardware import Hardware


@dataclass(frozen=True)
class Controls:
    """shares: of the experts that a GPU lacks, between the CPU and the bus."""

    shares: bool = False

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Whatever was planned by rates that are assumed, or were measured beside other programs."""
        return cls(shares=hardware.has_doubtful_rates)
