"""The n-gram embedding of a layer: rows of a large table, by hashes of the last tokens."""

from typing import Final

NGRAM_CACHE_BYTES: Final = 64 << 20  # of rows of a table that were used, kept in RAM at most
