"""What was measured of a GPU's steps of one row. `gpu_rates.py` measures it."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

from coldstream.kernels.rate_record import RateRecord

_SECONDS: Final = (1e-8, 1e-2)  # that a launch may take


@dataclass(frozen=True)
class StepRates(RateRecord):
    """Of steps of one row. Bytes are those of experts of MEASURED_TYPE. None: times do not say it.

    launch_s: of a launch in a graph, beside its bytes. row_bytes_per_s: experts in the GPU's memory.
    row_bus_alone, row_bus_beside: experts in RAM that kernels read over the bus, alone and while the CPU
    computes others. staged_beside: experts that a launch copies over the bus meanwhile. request_s: of a
    request for missing experts on the CPU, whatever it asks for. misses_alone, misses_beside: what a request
    takes for experts beside that, alone and while others are copied over the bus.
    queue_s: what a launch takes the thread that queues it. prompt_ops_per_s: int8 multiplications and
    additions of a prompt's dense product.
    """

    bounds: ClassVar = (1e6, 1e14)  # bytes a second
    bounds_of: ClassVar = {
        "launch_s": _SECONDS,
        "queue_s": _SECONDS,
        "request_s": (0.0, 1e-2),
        "prompt_ops_per_s": (1e6, 1e17),
    }
    unsaid: ClassVar = ("launch_s", "row_bytes_per_s")  # by times

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
