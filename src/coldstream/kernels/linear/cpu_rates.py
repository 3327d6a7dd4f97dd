"""How fast this machine's cores multiply weights: of each type in caches, and of one type in RAM.

A type is bound by its bytes or by the instructions that unpack its codes, and a small type may be the slower
one. Weights in caches say what the instructions take. Bytes are those of the type with most of them for an
instruction, in RAM.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.best_runs import best_seconds
from coldstream.kernels.experts.cpu_rates import Codes, write_random_codes

Array = np.ndarray[Any, Any]

PRODUCT_ROWS: Final = (1, 8, 64)  # of activations: decoding, a draft or several answers, a prompt

_COLS: Final = 2048
_ROWS_OF_A_CORE: Final = 256
_LEAST_S, _MOST_S = 1e-3, 2e-2  # of runs with one type and number of rows
_LONGEST_S: Final = 0.1  # of runs with weights in RAM
_IN_RAM: Final = QuantType.Q8_0  # codes that need no unpacking
_IN_RAM_BYTES: Final = 680 * 2**20  # servers' caches hold half of a gigabyte


def measure_product_rates(num_threads: int) -> tuple[tuple[float, ...], ...]:
    """Weights times rows a second of so many threads, by type (in the order of QuantType) and `PRODUCT_ROWS`.

    Takes a second or two at most, but where the machine has no vector instructions.
    """
    runtime = _csrc.Runtime(num_threads)
    generator = np.random.default_rng(1)
    inputs = [generator.standard_normal((rows, _COLS), dtype=np.float32) for rows in PRODUCT_ROWS]
    num_weights = _ROWS_OF_A_CORE * num_threads
    codes = np.empty(num_weights * max(each.row_bytes(_COLS) for each in QuantType), np.uint8)
    return tuple(_rates_of(runtime, each, num_weights, inputs, codes) for each in QuantType)


class RowProduct:
    """A product of weights in RAM with one row, of so many threads.

    codes: `written_codes` for the weights. They are more than caches hold, if there are as many.
    """

    def __init__(self, num_threads: int, codes: Codes) -> None:
        row_bytes = _IN_RAM.row_bytes(_COLS)
        num_weights = min(_IN_RAM_BYTES, len(codes)) // row_bytes
        codes = codes[: num_weights * row_bytes]
        weight = _csrc.Weight.from_array(codes, int(_IN_RAM), num_weights, _COLS)
        x = np.random.default_rng(1).standard_normal((1, _COLS), dtype=np.float32)
        out = np.empty((1, num_weights), np.float32)
        self._num_bytes = len(codes)
        self.run = partial(_csrc.linear, _csrc.Runtime(num_threads), x, [weight], [out])

    def bytes_per_s(self) -> float:
        """Bytes of weights a second, the best of a tenth of a second."""
        return self._num_bytes / best_seconds(self.run, 0.0, _LONGEST_S)


def _rates_of(
    runtime: "_csrc.Runtime", quant_type: QuantType, num_weights: int, inputs: Sequence[Array], codes: Array
) -> tuple[float, ...]:
    """codes: bytes for weights of any type, one behind the other."""
    codes = codes[: num_weights * quant_type.row_bytes(_COLS)]
    write_random_codes(quant_type, codes)
    weight = _csrc.Weight.from_array(codes, int(quant_type), num_weights, _COLS)
    rates = []
    for x in inputs:
        rows = len(x)
        out = np.empty((rows, num_weights), np.float32)
        seconds = best_seconds(partial(_csrc.linear, runtime, x, [weight], [out]), _LEAST_S, _MOST_S)
        rates.append(num_weights * _COLS * rows / seconds)
    return tuple(rates)
