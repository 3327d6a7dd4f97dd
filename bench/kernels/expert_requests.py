"""What a request to the server of experts takes on the CPU, with and without experts that it expects.

    python -m bench.kernels.expert_requests --threads 15 --out docs/results/gpu/expert_requests.json

A token's layer asks for some experts of the 35B-A3B shape. Between two requests the threads have as long as a
GPU takes from a layer's experts to the next router. Experts are expected one or two requests ahead, as by
routers. A line gives the time within the server, and the time from the request to the answer as a client that
polls sees it.
"""

import argparse
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from bench.device import describe
from bench.kernels.cpu_experts import HIDDEN, expert_bytes, layer, numbers
from bench.results import add_result_options, write_result
from coldstream.kernels import _csrc

RANKS, EXPERTS, LAYERS = 8, 64, 8
PAUSE_S: Final = 45e-6


class Client:
    """A mailbox of one row, and a server of LAYERS layers."""

    def __init__(self, num_threads: int) -> None:
        self.request, self.done = np.zeros(1, np.uint32), np.ones(1, np.uint32)
        self.ahead, self.ids = np.zeros(RANKS, np.uint32), np.full((1, RANKS), -1, np.int32)
        x = np.random.default_rng(0).standard_normal((1, HIDDEN), dtype=np.float32)
        out = np.empty((1, RANKS, HIDDEN), np.float32)
        parts = (self.request, self.done, x, self.ids, out)
        self.server = _csrc.ExpertServer(_csrc.Runtime(num_threads), *parts, ahead=self.ahead)
        for _ in range(LAYERS):
            self.server.add_layer(*layer(EXPERTS))

    def expect(self, number: int, ids: "np.ndarray[Any, Any]") -> None:
        """Says what a later request will ask for, as the router of an earlier layer does."""
        words = (number % LAYERS + 1) << 16 | (ids + 1)
        self.ahead[1:], self.ahead[0] = words[1:], words[0]

    def ask(self, number: int, ids: "np.ndarray[Any, Any]") -> float:
        """Seconds until the experts of a layer are computed."""
        self.ids[0], self.done[0] = ids, 0
        begin = time.perf_counter()
        self.request[0] = (number % LAYERS + 1) | 1 << 16
        while self.done[0] == 0:
            pass
        return time.perf_counter() - begin


def pause() -> None:
    """What a GPU takes from a layer's experts to the next router."""
    end = time.perf_counter() + PAUSE_S
    while time.perf_counter() < end:
        pass


def measure(
    num_threads: int, counts: Sequence[int], ahead: Sequence[int], requests: int
) -> Iterator[dict[str, Any]]:
    """A row of the result for each number of experts, expected so many requests ahead; 0: not at all."""
    client, generator = Client(num_threads), np.random.default_rng(1)
    client.server.begin()
    for count, distance in itertools.product(counts, ahead):
        chosen = [generator.choice(EXPERTS, RANKS, replace=False).astype(np.int32) for _ in range(requests)]
        for ids in chosen:
            ids[count:] = -1
        seconds, before = [], client.server.work()
        for number, ids in enumerate(chosen):
            pause()
            if distance and number + distance < requests:
                client.expect(number + distance, chosen[number + distance])
            seconds.append(client.ask(number, ids))
        within = sum(after[2] - first[2] for after, first in zip(client.server.work(), before, strict=True))
        yield {
            "threads": num_threads,
            "experts": count,
            "expected_ahead": distance,
            "server_us": 1e6 * within / requests,
            "median_us": 1e6 * statistics.median(seconds),
            "bytes_per_s": count * expert_bytes() * requests / within,
        }
    client.server.end()
    client.server.check()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=numbers, default=[15])
    parser.add_argument("--experts", type=numbers, default=[0, 1, 2, 3, 4, 6, 8])
    parser.add_argument("--ahead", type=numbers, default=[0, 1, 2], help="requests; 0: unexpected")
    parser.add_argument("--requests", type=int, default=1000)
    add_result_options(parser)
    options = parser.parse_args()
    rows = []
    for count in options.threads:
        for row in measure(count, options.experts, options.ahead, options.requests):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    command = shlex.join(["python", "-m", "bench.kernels.expert_requests", *sys.argv[1:]])
    result = {"command": command, "machine": describe("cpu"), "pause_s": PAUSE_S, "rows": rows}
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
