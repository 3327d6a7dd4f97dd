"""What was measured of a GPU's steps of one row. `gpu_rates.py` measures it."""

import math
from dataclasses import dataclass, fields, replace
from typing import Final, Self

_SECONDS_BOUNDS: Final = (1e-8, 1e-2)  # that a launch may take
_REQUEST_BOUNDS: Final = (0.0, 1e-2)
_BYTES_BOUNDS: Final = (1e6, 1e14)  # a second
_OPS_BOUNDS: Final = (1e6, 1e17)
_UNSAID: Final = ("launch_s", "row_bytes_per_s")  # which times may not say


@dataclass(frozen=True)
class StepRates:
    """Of steps of one row. Bytes are those of experts of MEASURED_TYPE. None: times do not say it.

    launch_s: of a launch in a graph, beside its bytes. row_bytes_per_s: experts in the GPU's memory.
    row_bus_alone, row_bus_beside: experts in RAM that kernels read over the bus, alone and while the CPU
    computes others. staged_beside: experts that a launch copies over the bus meanwhile. request_s: of a
    request for missing experts on the CPU, whatever it asks for. misses_alone, misses_beside: what a request
    takes for experts beside that, alone and while others are copied over the bus.
    queue_s: what a launch takes the thread that queues it. prompt_ops_per_s: int8 multiplications and
    additions of a prompt's dense product.
    """

    launch_s: float | None
    row_bytes_per_s: float | None
    row_bus_alone: float
    row_bus_beside: float
    staged_beside: float
    request_s: float
    misses_alone: float
    misses_beside: float
    queue_s: float
    prompt_ops_per_s: float

    @classmethod
    def parsed(cls, document: object) -> Self | None:
        """Of the JSON object that `asdict` gave; None if it is none, or has absurd values."""
        if not isinstance(document, dict) or document.keys() != {each.name for each in fields(cls)}:
            return None
        if (document["launch_s"] is None) != (document["row_bytes_per_s"] is None):
            return None
        is_unsaid = document["launch_s"] is None
        rates = {name: value for name, value in document.items() if not (is_unsaid and name in _UNSAID)}
        return cls(**document) if all(_is_rate(*each) for each in rates.items()) else None

    @property
    def is_sane(self) -> bool:
        """Whether a machine may have these, so that they are worth keeping."""
        return self.parsed(vars(self)) is not None

    def better(self, other: "StepRates") -> Self:
        """This one, with what was better in another measurement of the same machine."""
        both: tuple[StepRates, ...] = (self, other)
        asked = max(both, key=lambda each: each.misses_alone)
        beside = max(both, key=lambda each: each.row_bus_beside + each.misses_beside)
        known = [each for each in both if each.launch_s and each.row_bytes_per_s]
        return replace(
            self,
            launch_s=min((each.launch_s or math.inf for each in known), default=None),
            row_bytes_per_s=max((each.row_bytes_per_s or 0.0 for each in known), default=None),
            row_bus_alone=max(self.row_bus_alone, other.row_bus_alone),
            # Of the same requests.
            request_s=asked.request_s,
            misses_alone=asked.misses_alone,
            # The bus and the CPU, measured at the same time.
            row_bus_beside=beside.row_bus_beside,
            misses_beside=beside.misses_beside,
            staged_beside=max(self.staged_beside, other.staged_beside),
            queue_s=min(self.queue_s, other.queue_s),
            prompt_ops_per_s=max(self.prompt_ops_per_s, other.prompt_ops_per_s),
        )


def _is_rate(name: str, value: object) -> bool:
    if name == "request_s":
        least, most = _REQUEST_BOUNDS
    elif name in ("launch_s", "queue_s"):
        least, most = _SECONDS_BOUNDS
    else:
        least, most = _OPS_BOUNDS if name == "prompt_ops_per_s" else _BYTES_BOUNDS
    return isinstance(value, float) and least <= value <= most
