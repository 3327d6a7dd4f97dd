"""Memory through which the GPU asks the CPU for experts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from coldstream.errors import GenerationFault
from coldstream.kernels.cuda.array import HostArray
from coldstream.kernels.cuda.runtime import allocations
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS as MAX_MAILBOX_ROWS

Array = np.ndarray[Any, Any]

WORDS_PER_LINE = 16  # of a cache line
UNWRITTEN = 0xFFFFFFFF  # bits of a float, see cuda/answer.cuh
ROWS_SHIFT = 16  # a request is layer + 1 in the bits below, the number of rows in those above


@dataclass(frozen=True)
class Mailbox:
    """Page-locked memory; `csrc/hybrid/expert_server.h` has the protocol.

    words: int32 [48], request, done and `ahead` in cache lines of their own; x: float32 [rows, E], ids: int32
    [rows, K] and out: float32 [rows, K, E], each written by one side only. is_marked: whether floats of `out`
    that the CPU has not written say so, by `UNWRITTEN`. Then who reads a row marks it again.
    """

    words: HostArray
    x: HostArray
    ids: HostArray
    out: HostArray
    is_marked: bool = False

    @classmethod
    def create(
        cls, num_ranks: int, hidden_size: int, rows: int = MAX_MAILBOX_ROWS, *, is_marked: bool = False
    ) -> Self:
        """For layers of these sizes and at most so many rows."""
        box = replace(cls._of(num_ranks, hidden_size, rows, allocations.page_locked), is_marked=is_marked)
        box.done.numpy()[0] = 1
        box.mark_unwritten()
        return box

    @classmethod
    def planned(cls, num_ranks: int, hidden_size: int, rows: int = MAX_MAILBOX_ROWS) -> Self:
        """With the same shapes, in memory that no device reads."""
        return cls._of(num_ranks, hidden_size, rows, np.zeros)

    @classmethod
    def _of(
        cls, num_ranks: int, hidden_size: int, rows: int, zeros: Callable[[tuple[int, ...], str], Array]
    ) -> Self:
        return cls(
            words=HostArray.of(zeros((3 * WORDS_PER_LINE,), "int32")),
            x=HostArray.of(zeros((rows, hidden_size), "float32")),
            ids=HostArray.of(zeros((rows, num_ranks), "int32")),
            out=HostArray.of(zeros((rows, num_ranks, hidden_size), "float32")),
        )

    def mark_unwritten(self) -> None:
        """Fills `out` with marks, if it has any. The CPU must have nothing to do."""
        if self.is_marked:
            self.out.numpy().view(np.uint32).fill(UNWRITTEN)

    @property
    def request(self) -> HostArray:
        return self.words[:1]

    @property
    def done(self) -> HostArray:
        """int32 [2]: whether the CPU has answered, and whether the device's wait for it timed out."""
        return self.words[WORDS_PER_LINE : WORDS_PER_LINE + 2]

    @property
    def ahead(self) -> HostArray:
        """int32 [WORDS_PER_LINE]: which experts of a later layer the CPU will probably be asked for."""
        return self.words[2 * WORDS_PER_LINE :]

    def arrays(self) -> tuple[Array, Array, Array, Array, Array]:
        """request and done, uint32 [1] each, x, ids and out, as NumPy arrays over the same memory."""
        words = (self.request.numpy().view(np.uint32), self.done[:1].numpy().view(np.uint32))
        return *words, self.x.numpy(), self.ids.numpy(), self.out.numpy()

    def check(self) -> None:
        """Call when the device is idle. Raises GenerationFault if a wait for the CPU has timed out."""
        if self.words.numpy()[WORDS_PER_LINE + 1] != 0:
            raise GenerationFault(
                "the CPU did not compute an expert in time, and what followed is lost: load the model again; "
                "if its file lies on a slow disk, try a larger --vram, or one that fits into memory"
            )
