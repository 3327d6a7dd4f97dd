"""How fast this machine's cores do what is between products with weights: attention, recurrent states, rows.

Attention of one row takes time for the keys and values that are cached, which a layer's weights have pushed
out of caches, and for each head that meets them. Two numbers of heads tell these apart. A prompt's rows meet
a state in chunks, and are written and read between two products. An operation also takes something whatever
it does, as all threads begin and end it together.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Final, Self

import numpy as np

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kernels.best_runs import FEWEST_RUNS, best_seconds
from coldstream.kernels.ops import AttentionHeads
from coldstream.kernels.rate_record import RateRecord

Array = np.ndarray[Any, Any]
Run = Callable[[], object]

_MOST_S: Final = 2e-2  # of runs of an operation
_LAYOUT: Final = CACHE_LAYOUTS["i16"]
_HEAD_DIM, _KV_HEADS = 128, 4
_LEAST_GROUP, _MOST_GROUP = 1, 8  # heads of queries for one of keys
_POSITIONS: Final = 2048  # that one row sees
_PROMPT: Final = 256  # rows of a prompt, which see as many positions
_STATES, _STATE_DIM, _CONV_WIDTH = 32, 128, 4
_HIDDEN: Final = 2048
_CODE: Final = 0x3C  # of cached values; four such bytes are a scale of 0.01
_SMALL_ROWS, _SMALL_COLS = 16, 256  # of weights that take next to no time


@dataclass(frozen=True)
class MixerRates(RateRecord):
    """Of all cores, a second, but for op_s: what an operation takes that does next to nothing.

    cached_bytes_per_s, row_pairs_per_s: attention of one row takes time for keys and values in RAM, and for
    elements of queries times the positions that they see. pairs_per_s: these elements in a prompt.
    state_values_per_s: values of a recurrent state times rows of a prompt. row_values_per_s: values of rows
    that an operation adds.
    """

    bounds: ClassVar = (1e5, 1e16)  # a second
    bounds_of: ClassVar = {"op_s": (1e-9, 1e-2)}

    op_s: float
    cached_bytes_per_s: float
    row_pairs_per_s: float
    pairs_per_s: float
    state_values_per_s: float
    row_values_per_s: float

    def better(self, other: "MixerRates") -> Self:
        """This one, with what was better in another measurement of the same machine."""
        best = {each.name: max(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return type(self)(**best | {"op_s": min(self.op_s, other.op_s)})

    def of_cores(self, number: int) -> Self:
        """Of so many cores, if this is of one."""
        rates = {each.name: number * getattr(self, each.name) for each in fields(self)}
        return type(self)(**rates | {"op_s": self.op_s})


def measure_mixer_rates(num_threads: int, read_weights: Run) -> MixerRates:
    """The rates of so many threads, in a fifth of a second and some runs of `read_weights`.

    read_weights: what takes the place of all else in caches.
    """
    runtime = _csrc.Runtime(num_threads)
    least_s, most_s = (
        _seconds_behind(read_weights, _attention(runtime, group, 1, _POSITIONS))
        for group in (_LEAST_GROUP, _MOST_GROUP)
    )
    smallest_s = 0.01 * least_s  # of a head and of bytes, should times not tell these apart
    head_s = max((most_s - least_s) / (_MOST_GROUP - _LEAST_GROUP), smallest_s)
    elements = _KV_HEADS * _HEAD_DIM
    prompt = _attention(runtime, _MOST_GROUP, _PROMPT, _PROMPT)
    return MixerRates(
        op_s=_seconds(_small_product(runtime)),
        cached_bytes_per_s=2
        * _POSITIONS
        * _KV_HEADS
        * _LAYOUT.row_bytes(_HEAD_DIM)
        / max(least_s - _LEAST_GROUP * head_s, smallest_s),
        row_pairs_per_s=_POSITIONS * elements / head_s,
        pairs_per_s=_MOST_GROUP * elements * _PROMPT**2 / 2 / _seconds(prompt),
        state_values_per_s=_PROMPT * _STATES * _STATE_DIM**2 / _seconds(_delta_net(runtime, _PROMPT)),
        row_values_per_s=_PROMPT * _HIDDEN / _seconds(_addition(runtime, _PROMPT)),
    )


def _seconds(run: Run) -> float:
    return best_seconds(run, 0.0, _MOST_S)


def _seconds_behind(read_weights: Run, run: Run) -> float:
    """Of the fastest run behind weights."""
    run()
    times = []
    for _ in range(FEWEST_RUNS):
        read_weights()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _attention(runtime: "_csrc.Runtime", group: int, num_rows: int, num_positions: int) -> Run:
    """The last rows of so many positions. group: heads of queries for one of keys."""
    kv_width = _KV_HEADS * _HEAD_DIM
    query, key, value = (_random(num_rows, width) for width in (group * kv_width, kv_width, kv_width))
    shape = (1, num_positions, _KV_HEADS, _LAYOUT.row_bytes(_HEAD_DIM))
    caches = [np.full(shape, _CODE, np.int8) for _ in range(2)]
    positions = np.arange(num_positions - num_rows, num_positions, dtype=np.int32)
    angles, state_ids = np.zeros((num_rows, _HEAD_DIM // 2, 2), np.float32), np.zeros(num_rows, np.int32)
    heads = AttentionHeads(None, None, 1e-6, output_gate="none")
    given: tuple[Any, ...] = (
        query,
        key,
        value,
        angles,
        heads,
        *caches,
        positions,
        state_ids,
        np.empty_like(query),
    )
    return partial(_csrc.attention, runtime, *given)


def _delta_net(runtime: "_csrc.Runtime", num_rows: int) -> Run:
    channels, width = 3 * _STATES * _STATE_DIM, _STATES * _STATE_DIM
    projections = [_random(num_rows, size) for size in (channels, width, _STATES, _STATES)]
    conv_weight, of_heads = np.ones((channels, _CONV_WIDTH), np.float32), np.full(_STATES, -1, np.float32)
    norm, key_head_ids = np.ones(_STATE_DIM, np.float32), np.arange(_STATES, dtype=np.int32)
    conv = np.zeros((1, _CONV_WIDTH - 1, channels), np.float32)
    state = np.zeros((1, _STATES, _STATE_DIM, _STATE_DIM), np.float32)
    weights = (conv_weight, of_heads, of_heads, norm, key_head_ids, _STATES, 1e-6)
    out = np.empty((num_rows, width), np.float32)
    given: tuple[Any, ...] = (*projections, *weights, conv, state, np.zeros(num_rows, np.int32), out)
    return partial(_csrc.gated_delta_net, runtime, *given)


def _addition(runtime: "_csrc.Runtime", num_rows: int) -> Run:
    x, y = (_random(num_rows, _HIDDEN) for _ in range(2))
    return partial(_csrc.add, runtime, x, y, np.empty_like(x))


def _small_product(runtime: "_csrc.Runtime") -> Run:
    codes = np.zeros(_SMALL_ROWS * QuantType.Q8_0.row_bytes(_SMALL_COLS), np.uint8)
    weight = _csrc.Weight.from_array(codes, int(QuantType.Q8_0), _SMALL_ROWS, _SMALL_COLS)
    out = np.empty((1, _SMALL_ROWS), np.float32)
    return partial(_csrc.linear, runtime, _random(1, _SMALL_COLS), [weight], [out])


def _random(num_rows: int, size: int) -> Array:
    return np.random.default_rng(1).standard_normal((num_rows, size), np.float32)
