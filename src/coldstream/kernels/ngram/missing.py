"""For devices without kernels for n-gram embeddings: a model that has them is refused before it is loaded."""

from coldstream.errors import UnsupportedError
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.ops import Array, CommittedPath, NgramHash, NgramState, Rows, Weight


class NoNgrams:
    """The part of `Ops` for n-gram embeddings. Raises UnsupportedError."""

    def norm_streams(self, x: Array, weight: Array, eps: float, num_streams: int) -> Array:
        raise _missing()

    def map_ngram_table(self, file: GGUFFile, info: TensorInfo) -> Weight:
        raise _missing()

    def ngram_ids(
        self, token_ids: Array, hashing: NgramHash, table: Weight, state: NgramState, rows: Rows
    ) -> Array:
        raise _missing()

    def ngram_rows(self, table: Weight, ids: Array) -> Array:
        raise _missing()

    def ngram_gate(self, key: Array, query: Array, value: Array) -> Array:
        raise _missing()

    def ngram_conv(
        self,
        streams: Array,
        gated: Array,
        normed: Array,
        taps: Array,
        dilation: int,
        state: NgramState,
        rows: Rows,
    ) -> Array:
        raise _missing()

    def commit_ngram(self, state: NgramState, path: CommittedPath) -> None:
        raise _missing()


def _missing() -> UnsupportedError:
    return UnsupportedError("no GPU kernels for n-gram embeddings are there yet; use --device cpu")
