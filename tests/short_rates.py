"""Rates of memory measured with less of it, in less time and whatever else runs: no test depends on them.

    python -P tests/short_rates.py bench -p 8     the command line, without seconds of measuring

-P, because the folders of tests beside it have names of packages.
"""

import sys
from collections.abc import Sequence

from coldstream.__main__ import main
from coldstream.kernels import memory_readers
from coldstream.placement import hardware
from coldstream.placement.conditions import Conditions
from coldstream.planning import machine


class QuietWatch:
    """As if no other program ran."""

    def __init__(self, cpu_ids: Sequence[int]) -> None:
        self._quiet = Conditions(len(cpu_ids))

    def conditions(self, samples: Sequence[float] = ()) -> Conditions:
        return self._quiet


_BYTES = 2**24
SHORT = (
    (hardware, "_BUFFER_BYTES", _BYTES),
    (memory_readers, "_WINDOW_S", 0.01),
    # Benchmarks leave the number out, which would be that of before.
    (hardware.measure_read_bandwidth, "__defaults__", (_BYTES,)),
    (machine, "LoadWatch", QuietWatch),
)
PROGRAM = ("-P", __file__)  # what is given to Python

if __name__ == "__main__":
    for owner, name, value in SHORT:
        setattr(owner, name, value)
    sys.exit(main())
