"""The sampler on the GPU must choose the very tokens that decoding's sampler chooses."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_row_cases import CUDA, check_compiles, for_each_architecture
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_cases import (
    Case,
    check_choices,
    choose_all,
    random_case,
    random_logits,
    sample_all,
)

from coldstream.decoding.sampling_params import SamplingParams
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.sample.cuda import PROGRAM, ROW_BYTES
from coldstream.kernels.sample.settings import BLOCKS_MISSED
from host_device import HOST

FULL_VOCAB = 248320
HOLDING = CudaProgram(HOST / "hold.cu", ("hold_processors",))
GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.sharded(of="compiled kernels")
@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)
    check_compiles(HOLDING, arch)


def check(cases: Sequence[Case], workspace: torch.Tensor | None = None, *, ahead: bool = False) -> None:
    check_choices(cases, CUDA, workspace, ahead=ahead)


@pytest.mark.gpu
def test_ten_thousand_random_cases() -> None:
    rng = np.random.default_rng(0)
    workspace = torch.zeros(100, ROW_BYTES, dtype=torch.uint8, device=CUDA)
    vocabs = (1, 2, 3, 31, 100, 511, 2047, 2048, 2049, 5000)
    for number in range(100):
        vocab = vocabs[number % len(vocabs)]
        cases = [random_case(rng, vocab) for _ in range(100)]
        check_choices(cases, CUDA, workspace, number % 3, ahead=number % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 40, 200])
def test_full_vocabulary(rows: int) -> None:
    """Of one row, whose blocks are as many as its tiles, to more rows than there are multiprocessors."""
    rng = np.random.default_rng(rows)
    workspace = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8, device=CUDA)
    for number in range(max(2, 40 // rows)):
        cases = [random_case(rng, FULL_VOCAB) for _ in range(min(rows, 8))]
        check((cases * rows)[:rows], workspace, ahead=number % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1, 2.0])
def test_truncation_within_crowded_bins(spread: float) -> None:
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
    together, _ = sample_all(cases, CUDA)
    assert [sample_all([case], CUDA)[0][0] for case in cases] == together


@pytest.mark.gpu
def test_blocks_without_a_place_are_waited_for_in_vain_and_the_next_launch_goes_well() -> None:
    """Another launch leaves too few multiprocessors, for longer than blocks wait."""
    from coldstream.kernels.cuda.limits import device_limits
    from coldstream.kernels.cuda.runtime import streams

    rng = np.random.default_rng(6)
    workspace = torch.zeros(2, ROW_BYTES, dtype=torch.uint8, device=CUDA)
    case = Case(rng.standard_normal(FULL_VOCAB).astype(np.float32), [0], replace(PLAIN, logprobs=5), 1)
    check([case], workspace)
    limits, other = device_limits(), streams.Stream()
    # One block a multiprocessor, as it has most of the shared memory.
    num_held, shared = limits.num_processors - 4, limits.shared_per_block - 1024
    with streams.on_stream(other):
        HOLDING.kernel("hold_processors").launch((1, 1, 1), 32, (0,))
        other.synchronize()
        HOLDING.kernel("hold_processors").launch((num_held, 1, 1), 32, (1500,), shared_bytes=shared)
    made = choose_all([case], CUDA, workspace, may_change=True)
    other.synchronize()
    assert [each.fault for each in made] == [BLOCKS_MISSED]
    check([case, replace(case, seed=2)], workspace)


@pytest.mark.gpu
def test_two_models_that_draw_at_once_draw_what_each_draws_alone() -> None:
    """From two threads, all of whose launches go to the device's one stream."""
    rng = np.random.default_rng(8)
    cases = [[random_case(rng, FULL_VOCAB) for _ in range(8)] for _ in range(2)]
    workspaces = [torch.zeros(8, ROW_BYTES, dtype=torch.uint8, device=CUDA) for _ in range(2)]

    def draw(number: int) -> None:
        for _ in range(4):
            check(cases[number], workspaces[number])

    with ThreadPoolExecutor(2) as threads:
        for made in [threads.submit(draw, number) for number in range(2)]:
            made.result()


@pytest.mark.gpu
def test_faults_are_counted() -> None:
    good = np.zeros(3000, dtype=np.float32)
    bad, infinite, ruined = good.copy(), good.copy(), good.copy()
    bad[[1, 2047, 2999]] = [np.nan, np.inf, -np.inf]
    infinite[:] = np.finfo(np.float32).max
    ruined[::50] = np.nan
    boosted = SamplingParams(repetition_penalty=0.5)
    cases = [
        Case(good, [0], PLAIN, 0),
        Case(bad, [0], boosted, 0),
        Case(infinite, [3], boosted, 0),
        Case(ruined, [3], GREEDY, 0),
    ]
    tokens, faults = sample_all(cases, CUDA)
    assert faults == [0, 3, -1, 60]
    assert all(0 <= token < 3000 for token in tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 2, 3, 33, 2047, 2048, 2049, 10_000, FULL_VOCAB])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_rows_without_a_draw_take_the_largest_logit(vocab: int, rows: int) -> None:
    """Twice with one workspace."""
    rng = np.random.default_rng(vocab + rows)
    workspace = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8, device=CUDA)
    for _ in range(2):
        cases = [Case(random_logits(rng, vocab), [0], GREEDY, 0) for _ in range(rows)]
        tokens, faults = sample_all(cases, CUDA, workspace)
        assert tokens == [int(case.logits.argmax()) for case in cases]
        assert faults == [0] * rows
