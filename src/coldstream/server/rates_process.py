"""The process that measures this machine again, beside a server that nobody asks.

Started by the API process as `python -m coldstream.server.rates_process DEVICE PARENT`, which kills it when a
request comes: the file of rates is replaced as a whole, or not at all. It ends when its parent dies.
"""

import sys
from collections.abc import Sequence

from coldstream.errors import ColdstreamError
from coldstream.kernels.cuda.device import find_gpu
from coldstream.planning.machine import compiling_for_rates, hardware_of, measure_again
from coldstream.server.engine_process import die_with
from coldstream.server.idle_rates import DONE, DUE


def run(arguments: Sequence[str]) -> int:
    """The process's main function and exit code. arguments: cpu or cuda, and the parent process's id."""
    device, parent = arguments
    die_with(int(parent))
    try:
        hardware = hardware_of(find_gpu() if device == "cuda" else None)
        with compiling_for_rates(hardware):
            return DUE if measure_again(hardware) else DONE
    except ColdstreamError as error:
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
