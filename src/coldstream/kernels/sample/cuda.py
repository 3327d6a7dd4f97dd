"""Chooses tokens on the device, the same as decoding's sampler, for all rows of a step in one call.

Settings of all rows, and the tokens that penalties apply to, are copied to the device before, in one copy.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.cuda.program import CudaProgram, Grid
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.sample.settings import RankedTokens, RowSettings

ROW_BYTES = 106552  # of workspace for one row
THREADS, BLOCK_TOKENS = 512, 2048
MAX_VOCAB = BLOCK_TOKENS**2  # as one block combines the results of all blocks of a row

SCAN = f"sampler_scan<{ROW_BYTES}>"
CHOOSE = "sampler_choose"
PROGRAM = CudaProgram(Path(__file__).with_name("sample.cu"), (SCAN, CHOOSE), is_slow=True)


@declared_in("sample/rows.cuh")
class _RowSettings(ctypes.Structure): ...


SETTINGS_WORDS = ctypes.sizeof(_RowSettings) // 4  # of 32 bits, for one row


@declared_in("sample/rows.cuh")
class _RankedRow(ctypes.Structure): ...


RANKED_WORDS = ctypes.sizeof(_RankedRow) // 4  # of 32 bits, before the likeliest tokens


@declared_in("sample/block.cuh")
class Logits(ctypes.Structure): ...


@declared_in("sample/rows.cuh")
class _Sampling(ctypes.Structure): ...


def write_rows(
    settings: Sequence[RowSettings],
    rows: Sequence[int],
    to: NDArray[np.int32],
    recent: NDArray[np.int32],
) -> int:
    """Writes settings of `rows` of logits as kernels read them; returns how much of `recent` is used.

    to: int32 [T, SETTINGS_WORDS], contiguous. recent: int32 [n], which gets each row's tokens for penalties,
    ascending, then its tokens with biases, then these, then the mask of tokens that may follow; ValueError if
    there are more. Rows that are ranked have `ranked_words` of the results, one after another.
    """
    structures = (_RowSettings * len(to)).from_buffer(to.data)
    first = first_ranked = 0
    for index, (each, row) in enumerate(zip(settings, rows, strict=True)):
        count, num_biased = len(each.recent), len(each.biased)
        own = recent[first : first + count]
        own[:] = each.recent
        own.sort()
        first_biased = first + count
        if num_biased:
            end = first_biased + num_biased
            recent[first_biased:end] = each.biased
            recent[end : end + num_biased] = np.asarray(each.biases, np.float32).view(np.int32)
        first_allowed = first_biased + 2 * num_biased
        if each.allowed is not None:
            recent[first_allowed : first_allowed + len(each.allowed)] = each.allowed.view(np.int32)
        structures[index] = _RowSettings(
            temperature=each.temperature,
            top_p=each.top_p,
            min_p=each.min_p,
            seed=each.seed,
            repetition_penalty=each.repetition_penalty,
            presence_penalty=each.presence_penalty,
            frequency_penalty=each.frequency_penalty,
            top_k=each.top_k,
            position=each.position,
            row=row,
            first_recent=first,
            num_recent=count,
            first_biased=first_biased,
            num_biased=num_biased,
            first_allowed=first_allowed,
            is_masked=each.allowed is not None,
            first_ranked=first_ranked,
            num_ranked=each.logprobs or 0,
            is_ranked=each.logprobs is not None,
        )
        first = first_allowed if each.allowed is None else first_allowed + len(each.allowed)
        first_ranked += ranked_words(each)
    return first


def ranked_words(settings: RowSettings) -> int:
    """Words of 32 bits that a row has among the results of ranks."""
    return 0 if settings.logprobs is None else RANKED_WORDS + 2 * settings.logprobs


def read_ranked(settings: RowSettings, words: NDArray[np.int32], vocab: int) -> RankedTokens:
    """The results of a row that is ranked, whose token was chosen without a fault.

    words: its [ranked_words]; vocab: the number of logits.
    """
    head = _RankedRow.from_buffer_copy(words[:RANKED_WORDS].tobytes())
    most = settings.logprobs or 0
    ids, logits = words[RANKED_WORDS:].reshape(2, most)[:, : min(most, vocab)]
    return RankedTokens(
        likeliest=ids.tolist(),
        logits=logits.view(np.float32).tolist(),
        rank=head.rank,
        logit=head.logit,
        largest=head.largest,
        total=head.total_low | head.total_high << 32,
    )


def sample_cuda(
    logits: DeviceArray,
    settings: DeviceArray,
    recent: DeviceArray,
    unchanged: DeviceArray,
    workspace: DeviceArray,
    chosen: DeviceArray,
    earlier: DeviceArray,
    ranked: DeviceArray,
    *,
    is_greedy: bool,
) -> None:
    """The tokens after T rows of float32 logits [n, vocab], of any row stride: one launch.

    settings: int32 [T, SETTINGS_WORDS] and recent: int32 [m], as `write_rows` leaves them, the rows all
    different. earlier: int32 [k, 2], as `chosen`, of which a recent token −1 − i names the i-th; memory of
    its own. is_greedy: `are_greedy` of the settings. unchanged: float32 [m], and workspace: uint8
    [T, ROW_BYTES], aligned to 8 and zero at first, belong to these calls.

    Writes int32 chosen [T, 2]: the token, and 0, how many logits are not finite, NO_FINITE if biases,
    penalties and masks left no finite one, or BLOCKS_MISSED; the token is then some id of the vocabulary.
    Biases and penalties are written to logits, which are as before in the end unless blocks were missed. What
    is wanted of ranks is written to int32 ranked, for `read_ranked`.
    """
    num_rows, vocab = len(settings), logits.shape[1]
    if not 1 <= vocab <= MAX_VOCAB or logits.stride(1) != 1:
        raise ValueError(f"cannot sample from {vocab} logits (at most {MAX_VOCAB}, adjacent)")
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 4 == 0
    where = Logits(first=logits.data_ptr(), row_stride=logits.stride(0), vocab=vocab, aligned=int(aligned))
    sampling = _Sampling(
        logits=where,
        settings=settings.data_ptr(),
        recent=recent.data_ptr(),
        unchanged=unchanged.data_ptr(),
        states=workspace.data_ptr(),
        chosen=chosen.data_ptr(),
        earlier=earlier.data_ptr(),
        ranked=ranked.data_ptr(),
        num_rows=num_rows,
    )
    num_tiles = -(-vocab // BLOCK_TOKENS)
    if not is_greedy:
        grid = choosing_grid(num_rows, num_tiles, device_limits().num_processors)
        PROGRAM.kernel(CHOOSE).launch(grid, THREADS, (sampling,), overlap=True)
    else:
        PROGRAM.kernel(SCAN).launch((num_tiles, num_rows, 1), THREADS, (sampling,), overlap=True)


def are_greedy(settings: Sequence[RowSettings]) -> bool:
    """Whether all rows take their largest logits, and none is ranked."""
    return all(each.temperature == 0 and each.logprobs is None for each in settings)


def choosing_grid(num_rows: int, num_tiles: int, num_processors: int) -> Grid:
    """Blocks of a row, and rows at once.

    Blocks wait for each other, so there is at most one for each multiprocessor. Each has a tile or more.
    """
    at_once = min(num_rows, num_processors)
    tiles_of_a_block = -(-num_tiles // (num_processors // at_once))
    return -(-num_tiles // tiles_of_a_block), at_once, 1
