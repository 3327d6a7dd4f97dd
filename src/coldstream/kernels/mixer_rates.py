"""How fast this machine's cores do what is between products with weights: attention, recurrent states, rows.

Attention of one row takes time for the keys and values that are cached, which a layer's weights have pushed
out of caches, and for each head that meets them. Two numbers of heads tell these apart. A prompt's rows meet
a state in chunks, and are written and read between two products. An operation also takes something whatever
it does, as all threads begin and end it together: two numbers of rows of weights tell that from their bytes.
Between two steps Python runs, whose own code a layer's weights have pushed out of caches too.
"""

import statistics
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
from coldstream.kernels.experts.cpu_rates import Codes
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
_SHARED_BYTES: Final = 256 * 2**20  # of weights that several runs read, at most
_SHARED_COLS: Final = 2048
_SHORT, _LONG = 512, 4096  # rows of weights in RAM, as operations of a model have


@dataclass(frozen=True)
class MixerRates(RateRecord):
    """Of all cores, a second, but for two. op_s: what an operation that all cores share takes beside its
    bytes. call_s: what Python takes to begin an operation, behind weights.

    cached_bytes_per_s, row_pairs_per_s: attention of one row takes time for keys and values in RAM, and for
    elements of queries times the positions that they see. pairs_per_s: these elements in a prompt.
    state_values_per_s: values of a recurrent state times rows of a prompt. row_values_per_s: values of rows
    that an operation adds.
    """

    bounds: ClassVar = (1e5, 1e16)  # a second
    bounds_of: ClassVar = {"op_s": (1e-9, 1e-2), "call_s": (1e-9, 1e-1)}

    op_s: float
    call_s: float
    cached_bytes_per_s: float
    row_pairs_per_s: float
    pairs_per_s: float
    state_values_per_s: float
    row_values_per_s: float

    def better(self, other: "MixerRates") -> Self:
        """This one, with what was better in another measurement of the same machine."""
        both = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return type(self)(**{name: (min if name in _SECONDS else max)(pair) for name, pair in both.items()})

    def of_cores(self, number: int) -> Self:
        """Of so many cores, if this is of one."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return type(self)(
            **{name: value * (1 if name in _SECONDS else number) for name, value in given.items()}
        )


_SECONDS: Final = frozenset(MixerRates.bounds_of)  # what of a MixerRates is no rate


def measure_mixer_rates(num_threads: int, read_weights: Run, codes: Codes) -> MixerRates:
    """The rates of so many threads, in a fifth of a second and some runs of `read_weights`.

    read_weights: what takes the place of all else in caches. codes: `written_codes`.
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
        op_s=_fixed_seconds(_products(runtime, codes)),
        call_s=_seconds_behind(read_weights, _small_product(_csrc.Runtime(1))),
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


def _products(runtime: "_csrc.Runtime", codes: Codes) -> Callable[[], list[float]]:
    """Products with `_SHORT` and `_LONG` rows of weights in turn, each with other codes, as operations of one
    graph. What is returned runs it, and has the seconds of each.
    """
    row_bytes = QuantType.Q8_0.row_bytes(_SHARED_COLS)
    x, kept = _random(1, _SHARED_COLS), []
    pair = (_SHORT + _LONG) * row_bytes
    runtime.begin_capture(1)
    for begin in range(0, min(len(codes), _SHARED_BYTES) - pair + 1, pair):
        for rows, start in ((_SHORT, begin), (_LONG, begin + _SHORT * row_bytes)):
            part = codes[start : start + rows * row_bytes]
            weight = _csrc.Weight.from_array(part, int(QuantType.Q8_0), rows, _SHARED_COLS)
            out = np.empty((1, rows), np.float32)
            _csrc.linear(runtime, x, [weight], [out])
            kept.append((weight, out))
    graph = runtime.end_capture()

    def run() -> list[float]:
        assert len(x) == 1, "the graph reads it"
        assert kept, "it reads and writes these"
        return [seconds for _, seconds in graph.profile(1)]

    return run


def _fixed_seconds(run: Callable[[], list[float]]) -> float:
    """What a product takes besides its rows, by several runs of `_products`: of each product the fastest, and
    the median of those with as many rows.
    """
    runs = [run() for _ in range(FEWEST_RUNS)]
    times: list[float] = [min(each) for each in zip(*runs, strict=True)]
    short_s, long_s = statistics.median(times[::2]), statistics.median(times[1::2])
    smallest_s = 0.01 * short_s  # should times not tell rows from what is fixed
    return max(smallest_s, (_LONG * short_s - _SHORT * long_s) / (_LONG - _SHORT))


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
