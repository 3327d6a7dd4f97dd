"""One build of a comparison: times attention over caches that no processor's cache holds.

    python attention_worker.py '{"threads": 1, "tier": "auto"}'

A line of JSON in is a case to open, or `{}` to time it once. Imports nothing of `bench`, as it runs with
the sources of another commit. A case has layers enough to fill `memory` bytes, each with keys and values of
its own, so that a call reads them from memory as a model's step does.
"""

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np

from coldstream.kernels import _csrc
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS, INTEGER_SCALE_BYTES
from coldstream.kernels.ops import AttentionHeads

BLOCK = 256
MOST_LAYERS = 64


class Case:
    """A captured graph of all layers, and what they point to."""

    def __init__(self, runtime: _csrc.Runtime, of: dict[str, Any]) -> None:
        """of: a case of `bench.kernels.attention_depth`."""
        self._random = np.random.default_rng(0)
        (num_heads, num_kv_heads), size = of["heads"], of["head_dim"]
        num_rows = of["sequences"] * of["rows"]
        shape = (num_kv_heads, CACHE_LAYOUTS[of["kv_type"]].row_bytes(size))
        num_blocks = -(-(of["depth"] + of["rows"]) // BLOCK)
        seen = min(of["window"] or of["depth"], of["depth"])
        num_bytes = 2 * of["sequences"] * seen * shape[0] * shape[1]
        self.num_layers = max(1, min(MOST_LAYERS, -(-of["memory"] // num_bytes)))
        self.num_bytes = num_bytes
        queries, keys, values = (
            self._random.standard_normal((num_rows, count * size), np.float32)
            for count in (num_heads, num_kv_heads, num_kv_heads)
        )
        angles = np.zeros((num_rows, 16, 2), np.float32)
        angles[..., 0] = 1
        rows = self._rows(of, num_blocks)
        self._out = [np.empty((num_rows, num_heads * size), np.float32) for _ in range(self.num_layers)]
        caches = [
            self._cache((of["sequences"] * num_blocks, BLOCK, *shape), of["kv_type"], size)
            for _ in range(2 * self.num_layers)
        ]
        norm = np.ones(size, np.float32)
        heads = AttentionHeads(norm, norm, 1e-6, "none", of["window"])
        self._graphs, self._num_rows = [], num_rows
        for layer, out in enumerate(self._out):
            pair = caches[2 * layer : 2 * layer + 2]
            runtime.begin_capture(num_rows)
            _csrc.attention(
                runtime,
                queries,
                keys,
                values,
                angles,
                heads,
                *pair,
                *rows[:2],
                out,
                _csrc.BatchRows(*rows[1:]),
            )
            self._graphs.append(runtime.end_capture())
        self._clock = time.thread_time if of["own_time"] else time.perf_counter
        self._kept = (queries, keys, values, angles, norm, rows, caches)

    def _rows(self, of: dict[str, Any], num_blocks: int) -> list[np.ndarray[Any, Any]]:
        """Positions, segments, tables, indices, parents, kept."""
        count, sequences = of["rows"], of["sequences"]
        row = np.arange(sequences * count, dtype=np.int32)
        step, segments = row % count, row // count
        parents = np.where(step == 0, -1, row - 1).astype(np.int32)
        kept = row if of["tree"] else np.full_like(row, -1)
        tables = np.arange(sequences * num_blocks, dtype=np.int32).reshape(sequences, num_blocks)
        places = of["depth"] + step
        return [
            places.astype(np.int32),
            segments.astype(np.int32),
            tables,
            places.astype(np.int32),
            parents,
            kept,
        ]

    def _cache(self, shape: tuple[int, ...], kv_type: str, size: int) -> np.ndarray[Any, Any]:
        """Any codes, with scales of a normal head."""
        cache = np.resize(self._random.integers(-127, 128, 1 << 20, np.int8), shape)
        begin = size * CACHE_LAYOUTS[kv_type].value_bits // 8
        scale = np.full(1, 1 / 50, np.float32).view(np.int8)
        cache[..., begin : begin + INTEGER_SCALE_BYTES] = scale
        return cache

    def time(self) -> dict[str, Any]:
        """Seconds of each layer in turn, and what tells the bits of all."""
        seconds = [self._seconds(graph) for graph in self._graphs]
        digest = hashlib.sha256(b"".join(out.tobytes() for out in self._out)).hexdigest()
        return {"seconds": seconds, "digest": digest}

    def _seconds(self, graph: _csrc.Graph) -> float:
        start = self._clock()
        graph.run(self._num_rows)
        return self._clock() - start


def main() -> None:
    options = json.loads(sys.argv[1])
    runtime = _csrc.Runtime(options["threads"], options["tier"])
    print(json.dumps({"tier": runtime.tier}), flush=True)
    case: Case | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request:
            case = None  # before the next takes its memory
            case = Case(runtime, request)
            answer = {"bytes": case.num_bytes, "layers": case.num_layers}
        else:
            assert case is not None
            answer = case.time()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
