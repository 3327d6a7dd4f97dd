"""Memory through which the GPU asks the host for rows of a table of n-grams."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from coldstream.errors import GenerationFault
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import HostArray
from coldstream.kernels.cuda.runtime import allocations

Array = np.ndarray[Any, Any]

_WORDS_PER_LINE = 16  # of a cache line


@dataclass(frozen=True)
class NgramMailbox:
    """Page-locked memory; `csrc/hybrid/ngram_server.h` has the protocol.

    words: int32 [32], request and done in cache lines of their own; ids: int32 [rows, heads], written by the
    device, and found: uint8 [rows, heads · bytes of a row of the table], written by the host. width: values
    of a row of `found`.
    """

    words: HostArray
    ids: HostArray
    found: HostArray
    width: int
    quant_type: QuantType

    @classmethod
    def create(cls, rows: int, num_heads: int, num_cols: int, quant_type: QuantType) -> Self:
        """For steps of up to so many rows, each of so many of a table's rows."""
        return cls._of(rows, num_heads, num_cols, quant_type, allocations.page_locked)

    @classmethod
    def planned(cls, rows: int, num_heads: int, num_cols: int, quant_type: QuantType) -> Self:
        """With the same shapes, in memory that no device reads and nobody writes."""
        return cls._of(rows, num_heads, num_cols, quant_type, np.empty)

    @classmethod
    def _of(
        cls,
        rows: int,
        num_heads: int,
        num_cols: int,
        quant_type: QuantType,
        make: Callable[[tuple[int, ...], str], Array],
    ) -> Self:
        row_bytes = num_heads * quant_type.row_bytes(num_cols)
        return cls(
            words=HostArray.of(make((2 * _WORDS_PER_LINE,), "int32")),
            ids=HostArray.of(make((rows, num_heads), "int32")),
            found=HostArray.of(make((rows, row_bytes), "uint8")),
            width=num_heads * num_cols,
            quant_type=quant_type,
        )

    @property
    def num_bytes(self) -> int:
        """Of page-locked memory."""
        return sum(int(array.numpy().nbytes) for array in (self.words, self.ids, self.found))

    @property
    def request(self) -> HostArray:
        return self.words[:1]

    @property
    def done(self) -> HostArray:
        """int32 [2]: whether the rows are there, and whether the device's wait for them timed out."""
        return self.words[_WORDS_PER_LINE : _WORDS_PER_LINE + 2]

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """request and done, uint32 [1] each, ids and found, as NumPy arrays over the same memory."""
        words = (self.request.numpy().view(np.uint32), self.done[:1].numpy().view(np.uint32))
        return *words, self.ids.numpy(), self.found.numpy()

    def check(self) -> None:
        """Call when the device is idle. Raises GenerationFault if a wait for the host has timed out."""
        if self.done.numpy()[1] != 0:
            raise GenerationFault(
                "rows of n-grams were not read in time, and what followed is lost: load the model again; if "
                "its file lies on a slow disk, copy it to a faster one"
            )
