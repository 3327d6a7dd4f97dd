"""Batches whose rows choose blocks of positions, for the tests of indexers on CPUs and on GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from random import Random
from typing import TypeVar

import torch
from attention_batches import MOST_POSITIONS, Part, batch_of, on
from cpu_cases import random

from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import batch_rows
from coldstream.kernels.indexer.cuda import IndexerWorkspace, choose_blocks_cuda
from coldstream.kernels.indexer.records import IndexerHeads, IndexerInputs
from coldstream.kernels.indexer.reference import choose_blocks_exact
from coldstream.kernels.ops import BLOCK_POSITIONS, RopeSpec, Rows
from coldstream.kernels.rope.reference import rope_angles

T = TypeVar("T")
ROPE = RopeSpec(16, 1e4)
Words = tuple[torch.Tensor, torch.Tensor]  # of all rows, and the cache behind them


def padded(of: T, count: int) -> T:
    """Columns of rows with so many of no sequence behind, whose numbers are −1."""
    if isinstance(of, torch.Tensor):
        return torch.cat((of, torch.full((count, *of.shape[1:]), -1, dtype=of.dtype, device=of.device)))  # type: ignore[return-value]
    if not is_dataclass(of):
        return of
    columns = {name: padded(each, count) for name, each in vars(of).items() if name != "tables"}
    return replace(of, **columns)  # type: ignore[type-var, return-value]


@dataclass(frozen=True)
class IndexCase:
    """Random rows over a random cache, in which everything that no row reads is NaN."""

    parts: Sequence[Part]
    num_heads: int = 3
    size: int = 32
    block_size: int = 4
    num_blocks: int = 3
    dtype: torch.dtype = torch.float16
    seed: int = 0
    has_ties: bool = False  # queries of zeros: all scores are equal
    spoilt: int | None = None  # a committed position of the first sequence that holds NaN
    most_positions: int = MOST_POSITIONS

    def rows(self) -> Rows:
        return batch_of(self.parts, Random(self.seed), is_deep=True, most_positions=self.most_positions)

    def inputs(self) -> IndexerInputs:
        positions = self.rows().positions
        query, key = (
            random(self.seed + i, len(positions), width)
            for i, width in enumerate((self.num_heads * self.size, self.size))
        )
        of_blocks = rope_angles(positions, replace(ROPE, block_size=self.block_size))
        return IndexerInputs(
            0 * query if self.has_ties else query, key, rope_angles(positions, ROPE), of_blocks
        )

    def heads(self) -> IndexerHeads:
        norms = (random(self.seed + i, self.size) + 1 for i in (2, 3))
        return IndexerHeads(*norms, 1e-6, self.num_blocks * self.block_size, self.block_size)

    def cache(self) -> torch.Tensor:
        """In blocks; the rows' own places hold NaN too."""
        batch = self.rows().batch
        assert batch is not None
        made = torch.full((batch.tables.numel(), BLOCK_POSITIONS, 1, self.size), torch.nan, dtype=self.dtype)
        for table, part in zip(batch.tables.long(), self.parts, strict=True):
            indices = torch.arange(part.committed)
            values = random(self.seed + 4, part.committed, 1, self.size).to(self.dtype)
            made[table[indices // BLOCK_POSITIONS], indices % BLOCK_POSITIONS] = values
        if self.spoilt is not None:
            made[int(batch.tables[0, 0]), self.spoilt] = torch.nan
        return made

    def expected(self) -> Words:
        """By the definition."""
        cache = self.cache()
        return choose_blocks_exact(self.inputs(), self.heads(), cache, self.rows()).words, cache

    def on_gpu(self, device: str = "cpu", at_once: int | None = None, num_padding: int = 0) -> Words:
        """The same by a GPU's kernels, with rows of no sequence behind.

        at_once: rows whose scores are there at the same time.
        """
        inputs, heads, cache, rows = (
            on(device, each) for each in (self.inputs(), self.heads(), self.cache(), self.rows())
        )
        inputs, rows = (padded(each, num_padding) for each in (inputs, rows))
        num_rows, num_blocks = len(rows.positions), self.most_positions // self.block_size
        empty = partial(torch.full, fill_value=torch.nan, device=device)
        workspace = IndexerWorkspace(
            empty((num_rows, self.num_heads, self.size)), empty((at_once or num_rows, num_blocks))
        )
        shape = (num_rows, heads.num_words(self.most_positions))
        words = torch.full(shape, -1, dtype=torch.int32, device=device)
        choose_blocks_cuda(inputs, heads, cache, rows, workspace, words)
        return words.cpu(), cache.cpu()

    def on_cpu(self, runtime: _csrc.Runtime) -> Words:
        """The same by the C++ kernels."""
        inputs, cache, rows = self.inputs(), self.cache(), self.rows()
        words = torch.full(
            (len(rows.positions), self.heads().num_words(self.most_positions)), -1, dtype=torch.int32
        )
        _csrc.choose_blocks(
            runtime, inputs.query, inputs.key, inputs.angles, inputs.block_angles, self.heads(), cache,
            rows.positions, rows.state_ids, words, batch_rows(rows.batch),
        )  # fmt: skip
        return words, cache
