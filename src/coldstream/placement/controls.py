"""What moves while a model runs, by what its steps took. Pure.

A plan says where everything begins. No token depends on what moves.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Self

from coldstream.placement.hardware import Hardware


class Moves(Enum):
    """When something moves. IF_CONTRADICTED: from when steps take another time than they did at first."""

    NEVER = "never"
    IF_CONTRADICTED = "if contradicted"
    ALWAYS = "always"


@dataclass(frozen=True)
class Controls:
    """shares: of the experts that a GPU lacks, between the CPU and the bus. threads: how many threads of the
    CPU compute those of a token. ahead: how many of them are copied ahead, where the plan leaves that open.
    """

    shares: Moves = Moves.NEVER
    threads: Moves = Moves.NEVER
    ahead: Moves = Moves.NEVER

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """All from the beginning, if what it is planned by was assumed or measured beside other programs.

        Copies ahead move in any case: no rate says well enough what they take from the CPU.
        """
        when = Moves.ALWAYS if hardware.has_doubtful_rates else Moves.IF_CONTRADICTED
        return cls(when, when, Moves.ALWAYS)
