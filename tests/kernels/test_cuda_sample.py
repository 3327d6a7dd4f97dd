"""The sampler on the GPU must choose the very tokens that decoding's sampler chooses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cuda_row_cases import CUDA, check_compiles
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coldstream.decoding.sampling import sample_token
from coldstream.decoding.sampling_params import SamplingParams
from coldstream.errors import GenerationFault
from coldstream.kernels.sample.cuda import (
    ARGMAX_BYTES,
    PROGRAM,
    ROW_BYTES,
    SamplerRows,
    argmax_cuda,
    sample_cuda,
)

FULL_VOCAB = 248320
ALL_TOKENS = 2**31 - 1
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class Case:
    logits: NDArray[np.float32]
    context: Sequence[int]
    params: SamplingParams
    seed: int


def test_kernels_compile() -> None:
    check_compiles(PROGRAM)


def on_device(cases: Sequence[Case], slots: NDArray[np.int32], history: torch.Tensor) -> SamplerRows:
    def vector(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=CUDA)

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
        seed=torch.from_numpy(seeds).to(CUDA),
        position=vector([len(case.context) - 1 for case in cases], torch.int32),
        slot=torch.from_numpy(slots).to(CUDA),
        history=history,
    )


def sample_all(
    cases: Sequence[Case], workspace: torch.Tensor | None = None, gap: int = 0
) -> tuple[list[int], list[int]]:
    """Tokens and faults of cases with one vocabulary; the history must get the tokens and nothing else."""
    num_rows, vocab = len(cases), len(cases[0].logits)
    capacity = max(len(case.context) for case in cases) + 1
    slots = np.random.default_rng(num_rows).permutation(num_rows).astype(np.int32)
    history = torch.full((num_rows, capacity), -7, dtype=torch.int32)
    for case, slot in zip(cases, slots, strict=True):
        history[slot, : len(case.context)] = torch.tensor(case.context, dtype=torch.int32)
    rows = on_device(cases, slots, history.to(CUDA))
    logits = torch.full((num_rows, vocab + gap), torch.nan, device=CUDA)
    logits[:, :vocab] = torch.from_numpy(np.stack([case.logits for case in cases]))
    if workspace is None:
        workspace = torch.zeros(num_rows, ROW_BYTES, dtype=torch.uint8, device=CUDA)
    tokens, faults = (Guarded(num_rows, dtype=torch.int32, device=CUDA) for _ in range(2))
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
        top_k=int(rng.choice([0, 0, 1, 2, 40, rng.integers(1, vocab + 1), vocab, 2**31])),
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


def check(cases: Sequence[Case], workspace: torch.Tensor | None = None, gap: int = 0) -> None:
    tokens, faults = sample_all(cases, workspace, gap)
    for case, token, fault in zip(cases, tokens, faults, strict=True):
        try:
            expected = sample_token(case.logits, case.context, case.params, case.seed)
        except GenerationFault:
            assert fault != 0
            continue
        assert (fault, token) == (0, expected), case


@pytest.mark.gpu
def test_ten_thousand_random_cases() -> None:
    rng = np.random.default_rng(0)
    workspace = torch.zeros(100, ROW_BYTES, dtype=torch.uint8, device=CUDA)
    vocabs = (1, 2, 3, 31, 100, 511, 2047, 2048, 2049, 5000)
    for round_number in range(100):
        vocab = vocabs[round_number % len(vocabs)]
        check([random_case(rng, vocab) for _ in range(100)], workspace, gap=round_number % 3)


@pytest.mark.gpu
def test_full_vocabulary() -> None:
    rng = np.random.default_rng(1)
    for _ in range(6):
        check([random_case(rng, FULL_VOCAB) for _ in range(8)])


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1, 2.0])
def test_cuts_within_crowded_bins(spread: float) -> None:
    """More tokens than the list holds may lie where top-k or top-p ends."""
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal(100_000) * spread).astype(np.float32)
    every = [
        SamplingParams(temperature=1.5, top_k=top_k, top_p=top_p, min_p=0.0)
        for top_k in (0, 40, 9_000, 50_000)
        for top_p in (1.0, 0.9, 0.3)
    ]
    check([Case(logits, [0] * n, params, n) for n, params in enumerate(every, 1)])


@pytest.mark.gpu
@given(
    logits=st.lists(
        st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32)), min_size=1, max_size=40
    ),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 45),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=200, deadline=None)
def test_any_settings(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    check([Case(np.array(logits, dtype=np.float32), [0], params, seed)])


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(3)
    cases = [random_case(rng, 3000) for _ in range(32)]
    together, _ = sample_all(cases)
    assert [sample_all([case])[0][0] for case in cases] == together


@pytest.mark.gpu
def test_steps_follow_each_other_in_one_graph() -> None:
    """The captured launches draw from what earlier replays appended."""
    rng = np.random.default_rng(4)
    logits = rng.standard_normal(5000).astype(np.float32) * 3
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, repeat_last_n=8)
    context = [5, 6, 7]
    history = torch.zeros(1, 40, dtype=torch.int32, device=CUDA)
    history[0, :3] = torch.tensor(context)
    rows = on_device([Case(logits, context, params, 11)], np.zeros(1, dtype=np.int32), history)
    source, device_logits = torch.from_numpy(logits).to(CUDA)[None], torch.empty(1, 5000, device=CUDA)
    workspace = torch.zeros(1, ROW_BYTES, dtype=torch.uint8, device=CUDA)
    token, fault = (torch.zeros(1, dtype=torch.int32, device=CUDA) for _ in range(2))

    def step() -> None:
        device_logits.copy_(source)
        sample_cuda(device_logits, rows, token, fault, workspace)
        rows.position.add_(1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(30):
        graph.replay()
    for _ in range(31):
        context.append(sample_token(logits, context, params, 11))
    assert history[0, :34].tolist() == context


@pytest.mark.gpu
def test_faults_are_counted() -> None:
    good = np.zeros(3000, dtype=np.float32)
    bad, infinite = good.copy(), good.copy()
    bad[[1, 2047, 2999]] = [np.nan, np.inf, -np.inf]
    infinite[:] = np.finfo(np.float32).max
    boosted = SamplingParams(repetition_penalty=0.5)
    cases = [Case(good, [0], PLAIN, 0), Case(bad, [0], boosted, 0), Case(infinite, [3], boosted, 0)]
    tokens, faults = sample_all(cases)
    assert faults == [0, 3, -1]
    assert all(0 <= token < 3000 for token in tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 2, 3, 33, 2047, 2048, 2049, 10_000, FULL_VOCAB])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_argmax(vocab: int, rows: int) -> None:
    rng = np.random.default_rng(vocab + rows)
    logits = np.stack([random_logits(rng, vocab) for _ in range(rows)])
    workspace = torch.zeros(rows, ARGMAX_BYTES, dtype=torch.uint8, device=CUDA)
    for _ in range(2):
        tokens, faults = (Guarded(rows, dtype=torch.int32, device=CUDA) for _ in range(2))
        argmax_cuda(torch.from_numpy(logits).to(CUDA), tokens.tensor, faults.tensor, workspace)
        assert tokens.checked().tolist() == logits.argmax(axis=1).tolist()
        assert faults.checked().tolist() == [0] * rows
        assert workspace.eq(0).all()


@pytest.mark.gpu
def test_argmax_counts_what_is_not_finite() -> None:
    logits = torch.zeros(2, 5000, device=CUDA)
    logits[1, ::50] = torch.nan
    tokens, faults = (torch.full((2,), -1, dtype=torch.int32, device=CUDA) for _ in range(2))
    argmax_cuda(logits, tokens, faults, torch.zeros(2, ARGMAX_BYTES, dtype=torch.uint8, device=CUDA))
    assert faults.tolist() == [0, 100]
    assert tokens[0] == 0
    assert 0 <= int(tokens[1]) < 5000
