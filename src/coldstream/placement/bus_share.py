"""Who computes the experts that are not in the GPU's memory: the CPU, or the GPU over the bus. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MissRates:
    """What a missing expert costs, in seconds, while CPU and bus are both at work."""

    cpu_s: float
    bus_s: float
    handshake_s: float  # to ask the CPU, and to hear from it


def streamed_counts(rates: MissRates, max_missing: int) -> tuple[int, ...]:
    """How many of n missing experts of a token are read over the bus, for n = 0 … max_missing.

    The number with which the slower of both sides is done first; of equal ones the least, which leaves the bus
    to copies.
    """
    return tuple(
        min(range(missing + 1), key=lambda streamed: (_layer_s(rates, missing, streamed), streamed))
        for missing in range(max_missing + 1)
    )


def _layer_s(rates: MissRates, missing: int, streamed: int) -> float:
    on_cpu = missing - streamed
    cpu_s = rates.handshake_s + on_cpu * rates.cpu_s if on_cpu else 0.0
    return max(cpu_s, streamed * rates.bus_s)
