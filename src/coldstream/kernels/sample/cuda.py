"""Choosing tokens on the device: the very tokens that decoding's sampler chooses.

What a row's sampling needs lies in device memory, so that captured launches serve all steps: its settings,
its place in its sequence, and the tokens of the sequence, to which the new one is added.
"""

import ctypes
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from coldstream.kernels.cuda.program import CudaProgram

ROW_BYTES = 106560  # of workspace for one row
ARGMAX_BYTES = 16
THREADS, BLOCK_TOKENS = 512, 2048
MAX_VOCAB = BLOCK_TOKENS**2  # one block adds up what all blocks of a row found

SCAN = f"sampler_scan<{ROW_BYTES}>"
ARGMAX = f"argmax_rows<{ARGMAX_BYTES}>"
PROGRAM = CudaProgram(
    Path(__file__).with_name("sample.cu"), (ARGMAX, SCAN, "sampler_bins", "sampler_cut", "sampler_draw")
)


@dataclass(frozen=True)
class SamplerRows:
    """One entry a row, contiguous tensors on the device; ranges and meanings are those of decoding's sampler.

    The row's context is history[slot][: position + 1], and the new token will be at position + 1.
    """

    temperature: torch.Tensor  # float64 [T]; 0: the largest logit
    top_k: torch.Tensor  # int32 [T]; 0: off
    top_p: torch.Tensor  # float64 [T]; 1: off
    min_p: torch.Tensor  # float64 [T]; 0: off
    repetition_penalty: torch.Tensor  # float32 [T]; 1: off
    presence_penalty: torch.Tensor  # float32 [T]; 0: off
    frequency_penalty: torch.Tensor  # float32 [T]; 0: off
    penalty_window: torch.Tensor  # int32 [T], tokens of context that penalties look at; 2^31 − 1: all
    seed: torch.Tensor  # int64 [T], the 64 bits of it
    position: torch.Tensor  # int32 [T], of the token whose logits these are
    slot: torch.Tensor  # int32 [T]
    history: torch.Tensor  # int32 [slots, positions], ids below the vocabulary's size


class _Logits(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_void_p),
        ("row_stride", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("aligned", ctypes.c_int32),
    )


class _Settings(ctypes.Structure):
    _fields_ = (
        *((field.name, ctypes.c_void_p) for field in fields(SamplerRows)),
        ("history_size", ctypes.c_int32),
    )


def argmax_cuda(
    logits: torch.Tensor, tokens: torch.Tensor, faults: torch.Tensor, workspace: torch.Tensor
) -> None:
    """The id of the largest of each row of float32 logits [T, vocab], the lowest of equal ones.

    Writes int32 tokens [T], and int32 faults [T]: how many logits are not finite (the token is then some id
    of the vocabulary). workspace: uint8 [T, ARGMAX_BYTES], zero at first and left zero. Rows may be apart.
    """
    grid, where = _grid(logits)
    PROGRAM.kernel(ARGMAX).launch(grid, THREADS, (where, workspace, tokens, faults), overlap=True)


def sample_cuda(
    logits: torch.Tensor,
    rows: SamplerRows,
    tokens: torch.Tensor,
    faults: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """The token that follows each row's context given its float32 logits [T, vocab]: five launches.

    Writes int32 tokens [T], history[slot][position + 1] where the history has that place, and int32 faults
    [T]: 0, how many logits are not finite, or −1 if penalties left no finite one; the token is then some id
    of the vocabulary. Mutates logits where penalties apply. workspace: uint8 [T, ROW_BYTES], aligned to 8,
    zero at first; belongs to these calls. Rows may be apart.
    """
    grid, where = _grid(logits)
    addresses = (getattr(rows, field.name).data_ptr() for field in fields(SamplerRows))
    settings = _Settings(*addresses, rows.history.shape[1])
    common = (where, settings, workspace)
    PROGRAM.kernel(SCAN).launch(grid, THREADS, (*common, tokens, faults), overlap=True)
    PROGRAM.kernel("sampler_bins").launch(grid, THREADS, common, overlap=True)
    for stage in range(2):
        PROGRAM.kernel("sampler_cut").launch(grid, THREADS, (*common, stage), overlap=True)
    PROGRAM.kernel("sampler_draw").launch(grid, THREADS, (*common, tokens), overlap=True)


def _grid(logits: torch.Tensor) -> tuple[tuple[int, int, int], _Logits]:
    """One block for 2048 tokens of a row, and where they are."""
    num_rows, vocab = logits.shape
    if not 1 <= vocab <= MAX_VOCAB or logits.stride(1) != 1:
        raise ValueError(f"cannot sample from {vocab} logits (at most {MAX_VOCAB}, adjacent)")
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 4 == 0
    grid = (-(-vocab // BLOCK_TOKENS), num_rows, 1)
    return grid, _Logits(logits.data_ptr(), logits.stride(0), vocab, int(aligned))
