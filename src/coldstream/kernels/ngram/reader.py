"""Rows of a table of n-grams for a GPU: threads of the host read them when a step asks for them."""

import os
from typing import Final

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ngram.mailbox import NgramMailbox
from coldstream.kernels.ngram.table import check_ngrams

MOST_READERS: Final = 8  # threads for the rows of a prompt, most of whose time is the disk's


class NgramReader:
    """The table, the mailbox of the steps that ask for its rows, and the threads that answer.

    Between the launch of a step and its end, one thread looks for requests without pause.
    """

    def __init__(self, file: GGUFFile, info: TensorInfo, num_rows: int, num_heads: int) -> None:
        """num_rows: of a step, at most."""
        self._file = file
        ops = CpuOps(min(MOST_READERS, len(os.sched_getaffinity(0))))
        self.table: _csrc.NgramTable = ops.map_ngram_table(file, info, num_heads)
        self.mailbox = NgramMailbox.create(num_rows, num_heads, self.table.num_cols)
        self._server = _csrc.NgramServer(ops.runtime, *self.mailbox.arrays(), self.table)

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
