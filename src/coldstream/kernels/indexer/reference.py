"""The indexer of attention: it chooses the blocks of positions that a row attends to.

A block is `block_size` positions side by side, counted from position 0. Once all of them are there, their raw
keys are averaged in order of position. The average is RMS-normed, and rotated by the angles of the block's
first position: the key of the block. Queries are normed and rotated as those of attention. The score of a
block for a row is Σ_h max(query_h · key, 0), h ascending.

A row sees the complete blocks with the best scores, at most `top_k` positions of them, of equal scores the
first blocks. It also sees the positions behind the last complete block, up to its own. A row at the last
position of a block has none behind, and its block is chosen like others.

The cache holds the raw key of every position, but for the last one of a block, where it holds the key of the
block. No other row needs that raw key. Rows of a draft tree are stored by their places in the tree, so that
each of several rows at the last position of a block has a key for the block of its own ancestors.
"""

from collections.abc import Callable

import torch

from coldstream.kernels.arithmetic.reference import constant, fma
from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.indexer.records import ChosenBlocks, IndexerHeads, IndexerInputs
from coldstream.kernels.ops import BLOCK_POSITIONS, Rows
from coldstream.kernels.rms_norm.reference import rms_norm, rms_norm_exact
from coldstream.kernels.rope.reference import rotate, rotate_exact
from coldstream.kernels.sequences import seen, written

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
Rotation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def choose_blocks(
    inputs: IndexerInputs, heads: IndexerHeads, cache: torch.Tensor, rows: Rows
) -> ChosenBlocks:
    """See `Ops.choose_blocks`. Mutates the cache."""
    return _choose(inputs, heads, cache, rows, rms_norm, rotate, scores)


def choose_blocks_exact(
    inputs: IndexerInputs, heads: IndexerHeads, cache: torch.Tensor, rows: Rows
) -> ChosenBlocks:
    """The same to the last bit, as docs/arithmetic.md defines it."""
    return _choose(inputs, heads, cache, rows, rms_norm_exact, rotate_exact, scores_exact)


def scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of the blocks with `keys` [n, d] for the heads of a row [H, d]: [n]."""
    return torch.relu(query @ keys.T).sum(dim=0)


def scores_exact(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One chain of fma over the dimensions of a head; a product that is no number counts as 0."""
    products = torch.zeros(query.shape[0], keys.shape[0])
    for i in range(query.shape[-1]):
        products = fma(query[:, i : i + 1], keys[:, i], products)
    total = torch.zeros(keys.shape[0])
    for of_head in torch.where(products > 0, products, 0.0):
        total = total + of_head
    return total


def best_blocks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Whether each of n blocks is among the `count` best by scores [n], of equal ones the first: bool [n]."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return torch.zeros(len(scores), dtype=torch.bool).index_fill(0, order[:count], True)


def seen_positions(chosen: ChosenBlocks, row: int, num_positions: int) -> torch.Tensor:
    """Whether each of the positions up to a row's own is in a block that it sees: bool [num_positions]."""
    blocks = torch.arange(num_positions) // chosen.block_size
    words: torch.Tensor = chosen.words[row, blocks // 32]
    return (words >> (blocks % 32)) % 2 != 0


def _choose(
    inputs: IndexerInputs,
    heads: IndexerHeads,
    cache: torch.Tensor,
    rows: Rows,
    norm: Norm,
    turn: Rotation,
    score: Scores,
) -> ChosenBlocks:
    size, block_size = cache.shape[-1], heads.block_size
    query = turn(norm(grouped(inputs.query, -1, size), heads.q_norm, heads.eps), inputs.angles)
    cache[written(rows)] = inputs.key.to(cache.dtype).unsqueeze(1)
    positions = rows.positions.tolist()
    for row, position in enumerate(positions):
        if (position + 1) % block_size == 0:
            pieces, places = (found[-block_size:] for found in seen(rows, row))
            total = torch.zeros(size)
            for raw in cache[pieces, places, 0].float():
                total = total + raw
            key = norm(total * constant(1 / block_size), heads.k_norm, heads.eps)
            turned = turn(key.reshape(1, 1, size), inputs.block_angles[row : row + 1])
            cache[pieces[-1], places[-1]] = turned[0].to(cache.dtype)
    length = cache.shape[1] if rows.batch is None else rows.batch.tables.shape[1] * BLOCK_POSITIONS
    words = torch.zeros(len(positions), heads.num_words(length), dtype=torch.int32)
    for row, position in enumerate(positions):
        pieces, places = (found[block_size - 1 :: block_size] for found in seen(rows, row))
        keys = cache[pieces, places, 0].float()
        chosen = best_blocks(score(query[row].float(), keys), heads.top_k // block_size)
        words[row] = _words(chosen, position, block_size, words.shape[1])
    return ChosenBlocks(words, block_size)


def _words(chosen: torch.Tensor, position: int, block_size: int, num_words: int) -> torch.Tensor:
    """int32 [num_words] of the complete blocks that are chosen, and of the row's own if it is not one."""
    bits = torch.zeros(num_words * 32, dtype=torch.int64)
    bits[: len(chosen)] = chosen.long()
    if (position + 1) % block_size:
        bits[len(chosen)] = 1
    words = (bits.reshape(num_words, 32) << torch.arange(32)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
