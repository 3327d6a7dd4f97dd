"""Logits and settings for the sampler of kernels, and what decoding's sampler makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from guarded import Guarded
from numpy.typing import NDArray

from coldstream.decoding.sampling import sample_token
from coldstream.decoding.sampling_params import SamplingParams
from coldstream.errors import GenerationFault
from coldstream.kernels.sample.cuda import ARGMAX_BYTES, ROW_BYTES, SamplerRows, argmax_cuda, sample_cuda

ALL_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Case:
    logits: NDArray[np.float32]
    context: Sequence[int]
    params: SamplingParams
    seed: int


def rows_of(
    cases: Sequence[Case], slots: NDArray[np.int32], history: torch.Tensor, device: torch.device
) -> SamplerRows:
    def vector(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    params = [case.params for case in cases]
    windows = [ALL_TOKENS if p.repeat_last_n is None else min(p.repeat_last_n, ALL_TOKENS) for p in params]
    seeds = np.array([case.seed for case in cases], dtype=np.uint64).view(np.int64)
    return SamplerRows(
        temperature=vector([p.temperature for p in params], torch.float64),
        top_k=vector([min(p.top_k, ALL_TOKENS) for p in params], torch.int32),
        top_p=vector([p.top_p for p in params], torch.float64),
        min_p=vector([p.min_p for p in params], torch.float64),
        repetition_penalty=vector([p.repetition_penalty for p in params], torch.float32),
        presence_penalty=vector([p.presence_penalty for p in params], torch.float32),
        frequency_penalty=vector([p.frequency_penalty for p in params], torch.float32),
        penalty_window=vector(windows, torch.int32),
        seed=torch.from_numpy(seeds).to(device),
        position=vector([len(case.context) - 1 for case in cases], torch.int32),
        slot=torch.from_numpy(slots).to(device),
        history=history,
    )


def sample_all(
    cases: Sequence[Case], device: torch.device, workspace: torch.Tensor | None = None, gap: int = 0
) -> tuple[list[int], list[int]]:
    """Tokens and faults of cases with one vocabulary; the history must get the tokens and nothing else."""
    num_rows, vocab = len(cases), len(cases[0].logits)
    capacity = max(len(case.context) for case in cases) + 1
    slots = np.random.default_rng(num_rows).permutation(num_rows).astype(np.int32)
    history = torch.full((num_rows, capacity), -7, dtype=torch.int32)
    for case, slot in zip(cases, slots, strict=True):
        history[slot, : len(case.context)] = torch.tensor(case.context, dtype=torch.int32)
    rows = rows_of(cases, slots, history.to(device, copy=True), device)
    logits = torch.full((num_rows, vocab + gap), torch.nan, device=device)
    logits[:, :vocab] = torch.from_numpy(np.stack([case.logits for case in cases]))
    if workspace is None:
        workspace = torch.zeros(num_rows, ROW_BYTES, dtype=torch.uint8, device=device)
    tokens, faults = (Guarded(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    sample_cuda(logits[:, :vocab], rows, tokens.tensor, faults.tensor, workspace)
    chosen = tokens.checked().tolist()
    for case, slot, token in zip(cases, slots, chosen, strict=True):
        history[slot, len(case.context)] = token
    assert torch.equal(rows.history.cpu(), history)
    return chosen, faults.checked().tolist()


def random_logits(rng: np.random.Generator, vocab: int) -> NDArray[np.float32]:
    kind = rng.integers(7)
    x = rng.standard_normal(vocab) * rng.choice([0.05, 0.5, 1, 3, 8, 30])
    if kind == 0:
        x = np.round(x)  # ties everywhere
    elif kind == 1:
        x = np.full(vocab, rng.choice([0.0, -3.5, 1e30]))
    elif kind == 2:
        x[rng.integers(vocab)] = rng.choice([15, 40, 3e38])  # one stands out
    elif kind == 3:
        x = np.where(rng.random(vocab) < 0.5, -0.0, 0.0) * np.ones(vocab)  # zeros of both signs are equal
    elif kind == 4:
        x = np.repeat(x, 2)[:vocab]
    return x.astype(np.float32)


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    has_penalties = rng.random() < 0.4
    return SamplingParams(
        temperature=float(rng.choice([0, 1e-3, 0.1, 0.8, 1, rng.uniform(0.1, 2), 20, 1e6])),
        top_k=int(rng.choice([0, 0, 1, 2, 40, rng.integers(1, vocab + 1), vocab, -1, 2**31 - 1])),
        top_p=float(rng.choice([1, 1, 0.95, 0.5, 0, rng.random(), 1 - 2**-53])),
        min_p=float(rng.choice([0, 0, 0.05, rng.random(), 1e-13, 1])),
        repetition_penalty=float(rng.choice([1, 1.1, 0.5, 100])) if has_penalties else 1.0,
        presence_penalty=float(rng.choice([0, 0.7, -2])) if has_penalties else 0.0,
        frequency_penalty=float(rng.choice([0, 0.3, -1.9])) if has_penalties else 0.0,
        repeat_last_n=[None, 0, 1, 8, 64][rng.integers(5)],
    )


def random_case(rng: np.random.Generator, vocab: int) -> Case:
    # A small part of the vocabulary, so that tokens repeat.
    context = rng.integers(0, min(vocab, 30), rng.integers(1, 200)).tolist()
    seed = int(rng.integers(0, 2**64, dtype=np.uint64))
    return Case(random_logits(rng, vocab), context, random_params(rng, vocab), seed)


def check_choices(
    cases: Sequence[Case], device: torch.device, workspace: torch.Tensor | None = None, gap: int = 0
) -> None:
    tokens, faults = sample_all(cases, device, workspace, gap)
    for case, token, fault in zip(cases, tokens, faults, strict=True):
        try:
            expected = sample_token(case.logits, case.context, case.params, case.seed)
        except GenerationFault:
            assert fault != 0
            continue
        assert (fault, token) == (0, expected), case


def check_argmax(logits: NDArray[np.float32], device: torch.device) -> None:
    """Twice with one workspace, which must be as it was."""
    rows = len(logits)
    workspace = torch.zeros(rows, ARGMAX_BYTES, dtype=torch.uint8, device=device)
    for _ in range(2):
        tokens, faults = (Guarded(rows, dtype=torch.int32, device=device) for _ in range(2))
        argmax_cuda(torch.from_numpy(logits).to(device), tokens.tensor, faults.tensor, workspace)
        assert tokens.checked().tolist() == logits.argmax(axis=1).tolist()
        assert faults.checked().tolist() == [0] * rows
        assert workspace.eq(0).all()
