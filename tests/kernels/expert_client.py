"""The other side of an expert server's mailbox, played by Python."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from coldstream.kernels import _csrc

ROWS = 16
LIMIT_S = 20.0  # only for a server that is broken


class ExpertClient:
    """A server for inputs of `width` values and `ranks` experts a row, and the memory it shares."""

    def __init__(
        self, width: int, ranks: int, threads: int = 2, tier: str = "auto", *, is_prefill: bool = False
    ) -> None:
        self.request, self.done = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        self.x = torch.zeros(ROWS, width)
        self.ids = torch.zeros(ROWS, ranks, dtype=torch.int32)
        self.out = torch.full((ROWS, ranks, width), 7.0)
        self.ahead = np.zeros(ROWS, np.uint32)
        self.runtime = _csrc.Runtime(threads, tier)
        parts = (self.request, self.done, self.x, self.ids, self.out)
        self.server = _csrc.ExpertServer(self.runtime, *parts, is_prefill=is_prefill, ahead=self.ahead)

    def expect(self, layer: int, ids: Sequence[int]) -> None:
        """Says what `layer` will probably ask for, by rank; −1: nothing that the server has."""
        words = [(layer + 1) << 16 | (expert + 1) for expert in ids]
        self.ahead[1 : len(words)] = words[1:]
        self.ahead[0] = words[0]

    def read_ahead(self) -> None:
        """Waits until the server has taken what was expected."""
        deadline = time.monotonic() + LIMIT_S
        while self.ahead[0] != 0:
            assert time.monotonic() < deadline, "what is expected was not read"

    def ask(self, layer: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The server's answer; 7 where an id says that the pair is computed elsewhere."""
        self.out.fill_(7.0)
        self.x[: len(x)], self.ids[: len(x)] = x, ids
        self.done[0] = 0
        self.request[0] = (layer + 1) | len(x) << 16
        deadline = time.monotonic() + LIMIT_S
        while self.done[0] == 0:
            assert time.monotonic() < deadline, "no answer came"
        assert self.request[0] == 0
        return self.out[: len(x)].clone()
