"""Sizes of a GPU's runner that plans count before there is one. Needs none of CUDA's packages."""

from typing import Final

from coldstream.kernels.ngram import NGRAM_CACHE_BYTES
from coldstream.models.spec.model_spec import ModelSpec

MAX_GRAPHS: Final = 48
GRAPH_BYTES: Final = MAX_GRAPHS * 4 * 2**20  # memory of the driver for captured graphs
RESERVE_BYTES: Final = 256 * 2**20  # memory of the driver for loaded kernels
_ID_BYTES: Final = 4
HEAD_ROWS: Final = 64  # of one call of the head, whose logits fit into page-locked memory of the host


def ngram_bytes(spec: ModelSpec, most_rows: int) -> int:
    """RAM for n-grams: rows of the table that were used, and those of a step of so many rows on their way."""
    if spec.ngram is None:
        return 0
    all_rows = spec.ngram.least_rows * spec.ngram.row_bytes
    on_their_way = most_rows * len(spec.ngram.hashing.sizes) * (_ID_BYTES + spec.ngram.row_bytes)
    return min(NGRAM_CACHE_BYTES, all_rows) + on_their_way


def mailbox_ranks(spec: ModelSpec) -> int:
    """Experts of a row in a mailbox: the FFN of a dense layer is the only expert of a row."""
    return max(1, spec.num_experts_per_tok)
