"""What the CPU takes for missing experts as a step of one row asks for them.

A layer asks the server of experts for some, most of which the threads expect since two layers before. Then it
leaves them alone until the next layer's router has run. So a request is measured as a model makes it: a part
of its time is the same whatever it asks for, and threads that read ahead have begun before it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from coldstream.errors import DeviceError
from coldstream.kernels import _csrc

Array = np.ndarray[Any, Any]

NUM_LAYERS: Final = 8  # that requests go to in turn, with other experts each time
LAYERS_AHEAD: Final = 2  # a layer's experts are expected so many before it, as by routers
OF_GUESSES: Final = 4  # one in so many experts is not expected, as in a trained model
_REQUEST_SHIFT: Final = 16
_NUM_REQUESTS: Final = 32  # of a window, if they take no longer than
_WINDOW_S: Final = 0.025
_NUM_WINDOWS: Final = 3
_LIMIT_S: Final = 5.0  # of a request, on any machine


class ExpertRequests:
    """A client of a server of experts. Use `running`. Each request raises DeviceError without an answer.

    weights: gate, up and down of all experts, of which each request asks for other ones.
    """

    def __init__(
        self, num_threads: int, weights: Sequence["_csrc.Weight"], num_ranks: int, pause_s: float
    ) -> None:
        """pause_s: from an answer to the next request."""
        gate, up, down = weights
        hidden, self._num_experts = down.num_rows, down.num_matrices
        self._pause_s, self._num_ranks, self._count = pause_s, num_ranks, 0
        self._request, self._done = np.zeros(1, np.uint32), np.ones(1, np.uint32)
        self._ahead, self._ids = np.zeros(num_ranks, np.uint32), np.full((1, num_ranks), -1, np.int32)
        x = np.random.default_rng(0).standard_normal((1, hidden), dtype=np.float32)
        out = np.empty((1, num_ranks, hidden), np.float32)
        box = self._request, self._done, x, self._ids, out
        self._server = _csrc.ExpertServer(_csrc.Runtime(num_threads), *box, ahead=self._ahead)
        for _ in range(NUM_LAYERS):
            self._server.add_layer(gate, up, down)

    @classmethod
    @contextmanager
    def running(
        cls, num_threads: int, weights: Sequence["_csrc.Weight"], num_ranks: int, pause_s: float
    ) -> "Iterator[ExpertRequests]":
        requests = cls(num_threads, weights, num_ranks, pause_s)
        requests._server.begin()
        try:
            yield requests
        finally:
            requests._server.end()
        requests._server.check()

    def best_seconds(self, number: int) -> float:
        """From a request for so many experts to its answer, on the CPU: the best of several windows' means.

        After one that wakes the threads.
        """
        return min(self.window(number) for _ in range(1 + _NUM_WINDOWS))

    def window(self, number: int, is_over: Callable[[], bool] | None = None) -> float:
        """The mean of requests for so many experts, until something is over; None: of some tens of them."""
        until = time.perf_counter() + _WINDOW_S
        before, num_requests, ends = self._served_seconds(), 0, False
        while not ends:
            self._ask(number)
            num_requests += 1
            is_enough = num_requests == _NUM_REQUESTS or time.perf_counter() > until
            ends = is_enough if is_over is None else is_over()
        return (self._served_seconds() - before) / num_requests

    def _served_seconds(self) -> float:
        return float(sum(seconds for _, _, seconds in self._server.work()))

    def _ask(self, number: int) -> None:
        """Says what a later request will ask for, asks for what is expected by now, and pauses."""
        self._expect(self._count + LAYERS_AHEAD, number)
        self._ids[0, :number], self._ids[0, number:] = self._experts_of(self._count, number), -1
        self._done[0] = 0
        self._request[0] = self._layer_of(self._count) | 1 << _REQUEST_SHIFT
        begin = time.perf_counter()
        while self._done[0] == 0:
            if time.perf_counter() - begin > _LIMIT_S:
                raise DeviceError("the CPU's threads do not answer a request for experts")
        until = time.perf_counter() + self._pause_s
        self._count += 1
        while time.perf_counter() < until:
            pass

    def _expect(self, count: int, number: int) -> None:
        words = np.zeros(self._num_ranks, np.uint32)
        expected = self._layer_of(count) << _REQUEST_SHIFT | (self._experts_of(count, number) + 1)
        words[:number] = np.where((count * number + np.arange(number)) % OF_GUESSES == 0, 0, expected)
        words[0] = words[0] or self._layer_of(count) << _REQUEST_SHIFT  # which says that there is something
        self._ahead[1:], self._ahead[0] = words[1:], words[0]  # the first one last

    def _experts_of(self, count: int, number: int) -> Array:
        return (count * number + np.arange(number)) % self._num_experts

    @staticmethod
    def _layer_of(count: int) -> int:
        """As a word names it, from 1 on."""
        return count % NUM_LAYERS + 1
