"""The part of `Ops` for n-gram embeddings on a GPU."""

from dataclasses import dataclass

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.cuda.products import CudaProducts
from coldstream.kernels.hyper_connections.cuda import norm_streams_cuda
from coldstream.kernels.ngram.cuda import (
    ngram_commit_cuda,
    ngram_conv_cuda,
    ngram_gate_cuda,
    ngram_ids_cuda,
    ngram_rows_cuda,
)
from coldstream.kernels.ngram.mailbox import NgramMailbox
from coldstream.kernels.ngram.reader import NgramReader
from coldstream.kernels.ops import CommittedPath, NgramHash, NgramState, Rows


@dataclass(frozen=True)
class AskedRows:
    """What `CudaNgrams.ngram_ids` has asked for. The ids themselves are in the mailbox."""

    num_rows: int


class CudaNgrams(CudaProducts):
    """Over a table that stays in the file. Its ids go to the host, and its rows come from there.

    max_rows: of a step. ngram_reader: the table's, once it is mapped; None over a plan of memory.
    ngram_bytes: of page-locked memory between both.
    """

    ngram_reader: NgramReader | None = None
    ngram_bytes = 0

    def __init__(self, memory: Memory, max_rows: int, *, notes_kernels: bool, has_host_tables: bool) -> None:
        super().__init__(memory, notes_kernels=notes_kernels, has_host_tables=has_host_tables)
        self._max_rows = max_rows

    def norm_streams(
        self, x: DeviceArray | Activations, weight: DeviceArray, eps: float, num_streams: int
    ) -> Activations:
        out = self.activations(*x.shape)
        values = x.values if isinstance(x, Activations) else x
        self.launch(norm_streams_cuda, values, num_streams, weight, eps, out.values, out.quantised)
        return out

    def map_ngram_table(self, file: GGUFFile, info: TensorInfo, hashing: NgramHash) -> NgramMailbox:
        if self.planning:
            shape = self._max_rows, len(hashing.sizes), info.shape[1]
            box = NgramMailbox.planned(*shape, info.quant_type)
        else:
            assert self.ngram_reader is None, "one layer of a model has n-grams"
            self.ngram_reader = NgramReader(file, info, hashing, self._max_rows)
            box = self.ngram_reader.mailbox
        self.ngram_bytes += box.num_bytes
        return box

    def ngram_ids(
        self, token_ids: DeviceArray, hashing: NgramHash, table: NgramMailbox, state: NgramState, rows: Rows
    ) -> AskedRows:
        self.launch(ngram_ids_cuda, token_ids, hashing, state, rows, table)
        return AskedRows(len(token_ids))

    def ngram_rows(self, table: NgramMailbox, ids: AskedRows) -> Activations:
        out = self.activations(ids.num_rows, table.width)
        self.launch(ngram_rows_cuda, table, out.values, out.quantised)
        return out

    def ngram_gate(self, key: Activations, query: Activations, value: DeviceArray) -> DeviceArray:
        out = self.empty(*key.shape)
        self.launch(ngram_gate_cuda, key.values, query.values, value, out)
        return out

    def ngram_conv(
        self,
        streams: DeviceArray,
        gated: DeviceArray,
        normed: Activations,
        taps: DeviceArray,
        dilation: int,
        state: NgramState,
        rows: Rows,
    ) -> DeviceArray:
        out = self.empty(*streams.shape)
        self.launch(ngram_conv_cuda, streams, gated, normed.values, taps, dilation, state, rows, out)
        return out

    def commit_ngram(self, state: NgramState, path: CommittedPath) -> None:
        self.launch(ngram_commit_cuda, state, path)
