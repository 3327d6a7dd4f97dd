"""How fast this machine's cores multiply weights of each type when memory is no bound.

A type is bound by its bytes or by the instructions that unpack its codes, and a small type may be the slower
one. The bytes are measured by readers of memory; here it is the instructions, with weights in caches.
"""

import time
from typing import Final

import numpy as np

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.experts.cpu_rates import random_weight

PRODUCT_ROWS: Final = (1, 8, 64)  # of activations: decoding, a draft or several answers, a prompt

_COLS: Final = 2048
_ROWS_OF_A_CORE: Final = 256
_FEWEST_RUNS: Final = 3
_RUNS_S: Final = 2e-3  # of one type and number of rows, if that is more runs


def measure_product_rates(num_threads: int) -> tuple[tuple[float, ...], ...]:
    """Weights times rows a second of so many threads, by type (in the order of QuantType) and `PRODUCT_ROWS`.

    Takes a second at most, but where the machine has no vector instructions.
    """
    runtime = _csrc.Runtime(num_threads)
    return tuple(_rates_of(runtime, quant_type, num_threads) for quant_type in QuantType)


def _rates_of(runtime: "_csrc.Runtime", quant_type: QuantType, num_threads: int) -> tuple[float, ...]:
    num_weights = _ROWS_OF_A_CORE * num_threads
    weight = random_weight(quant_type, num_weights, _COLS)
    rates = []
    for rows in PRODUCT_ROWS:
        x = np.random.default_rng(1).standard_normal((rows, _COLS), dtype=np.float32)
        out = np.empty((rows, num_weights), np.float32)
        rates.append(num_weights * _COLS * rows / _best_seconds(runtime, x, weight, out))
    return tuple(rates)


def _best_seconds(
    runtime: "_csrc.Runtime",
    x: "np.ndarray[tuple[int, int], np.dtype[np.float32]]",
    weight: "_csrc.Weight",
    out: "np.ndarray[tuple[int, int], np.dtype[np.float32]]",
) -> float:
    """Of a product, after one run that fills the caches."""
    _csrc.linear(runtime, x, [weight], [out])
    samples: list[float] = []
    while len(samples) < _FEWEST_RUNS or sum(samples) < _RUNS_S:
        start = time.perf_counter()
        _csrc.linear(runtime, x, [weight], [out])
        samples.append(time.perf_counter() - start)
    return min(samples)
