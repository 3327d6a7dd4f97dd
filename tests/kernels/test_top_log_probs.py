"""The likeliest tokens of rows of logits: the kernel, on the host and on a GPU, against NumPy."""

import numpy as np
import pytest
import torch
from cuda_row_cases import check_compiles, for_each_architecture
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.decoding.tree_builder import top_log_probs
from coldstream.kernels.top_log_probs.cuda import (
    MAX_RANKS,
    PROGRAM,
    SMALL_RANKS,
    top_log_probs_cuda,
    workspace_bytes,
)


def run(logits: np.ndarray, ranks: int, device: str, gap: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows, vocab = logits.shape
    where = torch.device(device)
    apart = torch.full((rows, vocab + gap), float("nan"), device=where)
    apart[:, :vocab] = torch.from_numpy(logits)
    parts = Guarded(workspace_bytes(rows, vocab, ranks), dtype=torch.uint8, device=where)
    arrivals = torch.zeros(rows, dtype=torch.int32, device=where)
    ids = Guarded(rows, ranks, dtype=torch.int32, device=where)
    log_probs = Guarded(rows, ranks, device=where)
    for _ in range(2):
        top_log_probs_cuda(apart[:, :vocab], parts.tensor, arrivals, ids.tensor, log_probs.tensor)
    assert not arrivals.any(), "the next launch counts from zero"
    parts.checked()
    return ids.checked().numpy(), log_probs.checked().numpy()


def check(logits: np.ndarray, ranks: int, device: str = "cpu", gap: int = 0) -> None:
    ids, log_probs = run(logits, ranks, device, gap)
    expected_ids, expected = top_log_probs(logits, ranks)
    assert ids.tolist() == expected_ids.tolist()
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-4)


def random_logits(seed: int, rows: int, vocab: int) -> np.ndarray:
    """Values that often are equal, between parts too."""
    rng = np.random.default_rng(seed)
    return np.round(4 * rng.standard_normal((rows, vocab)), 1).astype(np.float32)


@pytest.mark.sharded
@for_each_architecture
def test_the_kernel_compiles(arch: str) -> None:
    check_compiles(PROGRAM, arch)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("vocab", [4, 5, 31, 2047, 2048, 2049, 9001])
def test_any_size(vocab: int) -> None:
    for ranks in (1, 2, SMALL_RANKS, SMALL_RANKS + 1, MAX_RANKS):
        check(random_logits(ranks, 3, vocab), min(ranks, vocab), gap=ranks)


@pytest.mark.usefixtures("host")
@given(st.lists(st.floats(-40, 40, width=32), min_size=1, max_size=40), st.integers(1, MAX_RANKS))
@settings(max_examples=60)
def test_any_logits(values: list[float], ranks: int) -> None:
    check(np.array([values], np.float32), min(ranks, len(values)))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 2050])
def test_a_logit_that_is_not_finite_leaves_no_candidate_of_its_row(bad: float, place: int) -> None:
    logits = random_logits(1, 2, 4000)
    logits[0, place] = bad
    _, log_probs = run(logits, 4, "cpu")
    assert np.isnan(log_probs[0]).all()
    assert np.isfinite(log_probs[1]).all()


@pytest.mark.parametrize(("ranks", "vocab"), [(0, 10), (MAX_RANKS + 1, 10), (3, 2)])
def test_other_numbers_of_candidates_are_refused(ranks: int, vocab: int) -> None:
    ids = torch.zeros(1, ranks, dtype=torch.int32)
    memory = torch.zeros(workspace_bytes(1, 9, 2), dtype=torch.uint8)
    with pytest.raises(ValueError, match="likeliest tokens"):
        top_log_probs_cuda(torch.zeros(1, vocab), memory, ids, ids, torch.zeros(1, ranks))
    with pytest.raises(ValueError, match="bytes of workspace"):
        top_log_probs_cuda(torch.zeros(1, 9), memory[1:], ids, torch.zeros(1, 2).int(), torch.zeros(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4, 2048, 2049, 151_936, 248_320, 2_000_000])
def test_on_a_gpu(vocab: int) -> None:
    for rows, ranks in ((1, 1), (1, 4), (5, 3), (7, min(16, vocab))):
        check(random_logits(vocab, rows, vocab), ranks, "cuda", gap=rows)
