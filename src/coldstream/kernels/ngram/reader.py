"""Rows of a table of n-grams for a GPU: threads of the host read them when a step asks for them."""

import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ngram.mailbox import NgramMailbox
from coldstream.kernels.ngram.table import check_ngrams
from coldstream.kernels.ops import NgramHash

MOST_READERS: Final = 8  # threads for the rows of a prompt, most of whose time is the disk's


class NgramReader:
    """The table, the mailbox of the steps that ask for its rows, and the threads that answer.

    Between the launch of a step and its end, one thread looks for requests without pause.
    """

    def __init__(self, file: GGUFFile, info: TensorInfo, hashing: NgramHash, num_rows: int) -> None:
        """num_rows: of a step, at most."""
        self._file, self._hashing, num_heads = file, hashing, len(hashing.sizes)
        ops = CpuOps(min(MOST_READERS, len(os.sched_getaffinity(0))))
        self.table: _csrc.NgramTable = ops.map_ngram_table(file, info, hashing)
        self.mailbox = NgramMailbox.create(num_rows, num_heads, self.table.num_cols, info.quant_type)
        self._runtime = ops.runtime
        self._server = _csrc.NgramServer(ops.runtime, *self.mailbox.arrays(), self.table)

    def read_ahead(self, token_ids: NDArray[np.integer]) -> None:
        """Brings the rows of tokens that a later step asks for into RAM.

        The first of them may have other rows then, as what comes before is not looked at. A row that cannot
        be read is an error of the step that ends next.
        """
        hashing, count = self._hashing, len(token_ids)
        ids = np.empty((count, len(hashing.sizes)), np.int32)
        state = np.zeros((1, len(hashing.multipliers) - 1), np.int32)
        _csrc.ngram_ids(
            self._runtime, np.ascontiguousarray(token_ids, np.int32), hashing.multipliers, hashing.sizes,
            hashing.offsets, hashing.end_token, state, np.zeros(count, np.int32), ids,
        )  # fmt: skip
        _csrc.ngram_read_ahead(self._runtime, self.table, ids)

    def begin(self) -> None:
        """Call right before a step is launched."""
        self._server.begin()

    def close(self) -> None:
        """Call when the device is idle: nobody looks for requests any more."""
        self._server.end()

    def ended(self, num_running: int) -> None:
        """Call when all steps have ended but the last `num_running`, before results are used.

        Raises GenerationFault if the rows came too late, ModelChangedError and StorageError.
        """
        if not num_running:
            self._server.end()
        self._server.check()
        self.mailbox.check()
        check_ngrams(self.table, self._file)
