"""The indexer on a GPU: `indexer.cu`.

Nothing here allocates, synchronises or looks at device data. T rows, H heads of the indexer, D values a head.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from coldstream.kernels.attention.cuda import BatchArguments
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import overlaps
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.indexer.records import INDEXED_BLOCK_SIZES, IndexerHeads, IndexerInputs
from coldstream.kernels.ops import BLOCK_POSITIONS, Rows

PREPARE, SCORE, SELECT = (f"coldstream::index_{name}" for name in ("prepare", "score", "select"))
PROGRAM = CudaProgram(Path(__file__).with_name("indexer.cu"), (PREPARE, SCORE, SELECT))
PREPARE_THREADS, PREPARE_UNITS = 128, 8
SCORE_THREADS, SCORE_KEYS, KEY_STRIDE, SLICE_PAIRS = 128, 64, 68, 32
SELECT_THREADS = 512
HEAD_MULTIPLE, LARGEST_HEAD = 8, 128
HEAD_SIZES = f"multiples of {HEAD_MULTIPLE} up to {LARGEST_HEAD}"
MOST_SLICED, MOST_TILE_ROWS = 64, 32  # rows of a step whose blocks take one slice of pairs; of a block


@declared_in("indexer/indexer.cu")
class IndexArguments(ctypes.Structure): ...


@dataclass(frozen=True)
class IndexerWorkspace:
    """What is between the launches; contents undefined at first."""

    queries: DeviceArray  # float32 [T, H, D]
    scores: DeviceArray  # float32 [rows at once, blocks]


def takes_heads_of(head_dim: int) -> bool:
    """Whether there are kernels for them: HEAD_SIZES."""
    return head_dim in range(HEAD_MULTIPLE, LARGEST_HEAD + 1, HEAD_MULTIPLE)


def choose_blocks_cuda(
    inputs: IndexerInputs,
    heads: IndexerHeads,
    cache: DeviceArray,
    rows: Rows,
    workspace: IndexerWorkspace,
    words: DeviceArray,
) -> None:
    """`Ops.choose_blocks`: writes the cache, float16 [blocks, 256, 1, D], and `words`, int32 [T, words].

    ValueError for rows without block tables, and for what no kernel takes.
    """
    num_rows, head_dim = len(inputs.key), inputs.key.shape[1]
    arguments = _arguments(inputs, heads, cache, rows, workspace)
    units = inputs.query.shape[1] // head_dim + 1
    PROGRAM.kernel(PREPARE).launch(
        (num_rows, -(-units // PREPARE_UNITS), 1), PREPARE_THREADS, (arguments,), overlap=overlaps(num_rows)
    )
    arguments.words, arguments.num_words = words.data_ptr(), words.shape[1]
    at_once, num_blocks = workspace.scores.shape
    of_slice = max(1, SLICE_PAIRS // arguments.num_heads)
    tile_rows = min(MOST_TILE_ROWS, of_slice) if num_rows <= MOST_SLICED else MOST_TILE_ROWS
    for first in range(0, num_rows, at_once):
        count = min(at_once, num_rows - first)
        PROGRAM.kernel(SCORE).launch(
            (-(-num_blocks // SCORE_KEYS), -(-count // tile_rows), 1),
            SCORE_THREADS,
            (arguments, first, count, tile_rows),
            shared_bytes=score_bytes(head_dim, tile_rows),
            overlap=overlaps(num_rows),
        )
        PROGRAM.kernel(SELECT).launch(
            (count, 1, 1), SELECT_THREADS, (arguments, first), overlap=overlaps(num_rows)
        )


def score_bytes(head_dim: int, tile_rows: int) -> int:
    """Shared memory of a block that scores: keys, totals, and pairs or their products."""
    pairs = SLICE_PAIRS * max(head_dim + 4, SCORE_KEYS)
    return 4 * (head_dim * KEY_STRIDE + tile_rows * SCORE_KEYS + pairs)


def _arguments(
    inputs: IndexerInputs, heads: IndexerHeads, cache: DeviceArray, rows: Rows, workspace: IndexerWorkspace
) -> IndexArguments:
    head_dim = inputs.key.shape[1]
    check_array("the cache of an indexer", cache, "float16", is_contiguous=False)
    if not takes_heads_of(head_dim) or cache.shape[1:] != (BLOCK_POSITIONS, 1, head_dim):
        raise ValueError(f"no kernels for heads of {head_dim} values in a cache {list(cache.shape)}")
    if heads.block_size not in INDEXED_BLOCK_SIZES:
        raise ValueError(f"blocks of {heads.block_size} positions: they may have {INDEXED_BLOCK_SIZES}")
    return IndexArguments(
        query=inputs.query.data_ptr(),
        key=inputs.key.data_ptr(),
        angles=inputs.angles.data_ptr(),
        block_angles=inputs.block_angles.data_ptr(),
        q_norm=heads.q_norm.data_ptr(),
        k_norm=heads.k_norm.data_ptr(),
        queries=workspace.queries.data_ptr(),
        cache=cache.data_ptr(),
        scores=workspace.scores.data_ptr(),
        rows=BatchArguments.of(rows),
        block_stride=cache.stride(0),
        query_stride=inputs.query.stride(0),
        key_stride=inputs.key.stride(0),
        position_stride=cache.stride(1),
        num_heads=inputs.query.shape[1] // head_dim,
        head_dim=head_dim,
        rope_half=inputs.angles.shape[-2],
        num_chosen=heads.top_k // heads.block_size,
        block_shift=heads.block_size.bit_length() - 1,
        max_blocks=workspace.scores.shape[1],
        eps=heads.eps,
    )
