"""How fast this machine's cores multiply experts, by the rows that an expert has.

What a core multiplies depends on its instructions, on its clock while it does, and on what it shares with
other cores, so that it is measured, with weights that lie in memory as a model's do.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.best_runs import best_seconds
from coldstream.kernels.experts.shapes import EXPERT_ROWS, MATRICES, MEASURED_TYPE

Ids = np.ndarray[Any, np.dtype[np.int32]]
Codes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_HIDDEN, _FEED_FORWARD, _RANKS = 2048, 512, 8  # of Qwen3.5-35B-A3B
_EXPERTS, _FEWEST_EXPERTS = 384, 16  # two thirds of a gigabyte: servers' caches hold half of one
_MOST_S: Final = 0.25  # of runs of experts with so many rows


def random_weight(
    quant_type: QuantType, num_rows: int, num_cols: int, num_matrices: int = 1
) -> "_csrc.Weight":
    """Random codes under small positive scales."""
    data = random_codes(quant_type, quant_type.row_bytes(num_cols) * num_rows * num_matrices)
    return _csrc.Weight.from_array(data, int(quant_type), num_rows, num_cols, num_matrices)


def random_codes(quant_type: QuantType, num_bytes: int) -> Codes:
    """Blocks of random codes under small positive scales, wherever in a block the type keeps them: uint8.

    No scale is near the ends of float32. Some processors take a hundred times as long for a product that is
    not a normal number.
    """
    data = np.empty(num_bytes, np.uint8)
    write_random_codes(quant_type, data)
    return data


def write_random_codes(quant_type: QuantType, out: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
    """`random_codes` in a given array of bytes."""
    pattern, whole = _pattern(), len(out) // len(_pattern()) * len(_pattern())
    out[:whole].reshape(-1, len(pattern))[:] = pattern
    out[whole:] = pattern[: len(out) - whole]
    if quant_type == QuantType.MXFP4:
        exponents = out[:: quant_type.block_bytes]
        exponents[:] = exponents & 0x07 | 0x70


@cache
def _pattern() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    pattern = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    pattern[1::2] = pattern[1::2] & 0x1F | 0x10  # the high bytes of float16 scales
    return pattern


def random_experts(
    codes: Codes, num_experts: int, hidden: int, feed_forward: int
) -> tuple["_csrc.Weight", "_csrc.Weight", "_csrc.Weight"]:
    """Gate, up and down of so many experts of MEASURED_TYPE, of the first codes."""
    size = num_experts * MEASURED_TYPE.row_bytes(hidden) * feed_forward
    gate, up, down = (
        _csrc.Weight.from_array(
            codes[number * size : (number + 1) * size], int(MEASURED_TYPE), rows, cols, num_experts
        )
        for number, (rows, cols) in enumerate(
            ((feed_forward, hidden), (feed_forward, hidden), (hidden, feed_forward))
        )
    )
    return gate, up, down


def written_codes(num_threads: int, num_bytes: int) -> Codes:
    """`random_codes` of any type with float16 scales, that so many threads write.

    One measurement after the other reads them, as writing memory for each takes longer than most of these.
    """
    from concurrent.futures import ThreadPoolExecutor

    codes = np.empty(num_bytes, np.uint8)
    length = len(_pattern())  # of which the threads make copies
    bounds = [length * (num_bytes // length * part // num_threads) for part in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        parts = (codes[begin:end] for begin, end in pairwise([*bounds, num_bytes]))
        list(pool.map(partial(write_random_codes, MEASURED_TYPE), parts))
    return codes


def experts_of_rows(num_experts: int, rows: int) -> Ids:
    """Choices int32 [tokens, 8] that give each of `num_experts`, a multiple of 8, so many rows."""
    tokens = num_experts * rows // _RANKS
    chosen: Ids = np.arange(tokens * _RANKS, dtype=np.int32).reshape(tokens, _RANKS) % np.int32(num_experts)
    return chosen


def experts_run(
    runtime: "_csrc.Runtime",
    ids: Ids,
    weights: tuple["_csrc.Weight", "_csrc.Weight", "_csrc.Weight"],
) -> Callable[[], None]:
    """Runs the op once, for choices [tokens, ranks] and gate, up and down [F, E], [E, F]."""
    hidden_size = weights[-1].num_rows
    x = np.random.default_rng(1).standard_normal((len(ids), hidden_size), dtype=np.float32)
    out = np.empty((*ids.shape, hidden_size), np.float32)
    return partial(_csrc.routed_experts, runtime, x, ids, *weights, out)


def measure_expert_rates(num_threads: int, codes: Codes) -> tuple[float, ...]:
    """Bytes of weights a second of experts that have 1, 2, 4, … rows each (`EXPERT_ROWS`).

    codes: `written_codes` for the weights. Longer, with fewer experts, where each has more rows.
    """
    runtime = _csrc.Runtime(num_threads)
    expert_bytes = MATRICES * MEASURED_TYPE.row_bytes(_HIDDEN) * _FEED_FORWARD
    most = max(_FEWEST_EXPERTS, min(_EXPERTS, len(codes) // expert_bytes // _RANKS * _RANKS))
    gate, up, down = random_experts(codes, most, _HIDDEN, _FEED_FORWARD)
    rates = []
    for rows in EXPERT_ROWS:
        num_experts = max(_FEWEST_EXPERTS, most // max(1, rows // _RANKS))
        ids = experts_of_rows(num_experts, rows)
        seconds = best_seconds(experts_run(runtime, ids, (gate, up, down)), 0.0, _MOST_S)
        rates.append(num_experts * expert_bytes / seconds)
    return tuple(rates)
