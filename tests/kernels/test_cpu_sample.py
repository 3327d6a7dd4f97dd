"""The sampler in C++: the very tokens, ranks and faults of decoding's sampler, for rows of any settings."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sample_cases import Case, random_case, random_logits

from coldstream.decoding.logprobs import logprobs_of, ranked_by_ids, token_logprobs
from coldstream.decoding.sampling import sample_token, token_weights, top_k_ids
from coldstream.decoding.sampling_params import SamplingParams
from coldstream.errors import GenerationFault
from coldstream.kernels import _csrc

Array = NDArray[np.float32]
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
# About the sizes of a block of logits, and of a search for the largest ones.
VOCABS = [1, 2, 3, 31, 32, 33, 100, 1000, 2049, 5000]


def row(case: Case, changed: Array | None = None, **more: Any) -> _csrc.TokenChoice:
    settings = {**vars(case.settings()), **more}
    return _csrc.TokenChoice(case.logits, changed, **settings)


def check(cases: Sequence[Case]) -> None:
    """Chooses from all rows in one call, which must not change them."""
    before = [case.logits.copy() for case in cases]
    rows = [row(case) for case in cases]
    _csrc.choose_tokens(rows)
    for case, made, logits in zip(cases, rows, before, strict=True):
        assert case.logits.tobytes() == logits.tobytes()
        try:
            expected = case.expected()
        except GenerationFault:
            assert made.fault != 0
            continue
        assert (made.fault, made.token) == (0, expected.token), case
        if expected.logprobs is not None:
            ranked = ranked_by_ids(case.logits, made.token, *made.ranked)
            assert logprobs_of(made.token, ranked) == expected.logprobs, case


@pytest.mark.parametrize("vocab", VOCABS)
def test_random_cases(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(12):
        check([random_case(rng, vocab) for _ in range(5)])


@given(
    logits=st.lists(
        st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32)), min_size=1, max_size=40
    ),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 45),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    penalty=st.sampled_from([1.0, 1.5, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=300)
def test_any_settings(logits: list[float], seed: int, penalty: float, **filters: float) -> None:
    params = SamplingParams(**filters, repetition_penalty=penalty, frequency_penalty=0.5)  # type: ignore[arg-type]
    check([Case(np.array(logits, np.float32), [0, 0], params, seed)])


@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0])
def test_truncation_among_many_tokens_of_about_the_same_logit(spread: float) -> None:
    logits = (np.random.default_rng(2).standard_normal(10_000) * spread).astype(np.float32)
    every = [
        SamplingParams(temperature=1.5, top_k=top_k, top_p=top_p, min_p=0.0)
        for top_k, top_p in ((0, 0.9), (40, 1.0), (40, 0.3), (313, 1.0), (9_000, 0.9))
    ]
    check([Case(logits, [0] * n, params, n) for n, params in enumerate(every, 1)])


def test_a_draw_reaches_every_token() -> None:
    logits = np.array([0.0, 0.1, -0.2, 0.1, -30.0, 0.05], np.float32)
    cases = [Case(logits, [0] * (1 + n % 7), PLAIN, n * 0x9E3779B97F4A7C15 % 2**64) for n in range(150)]
    check(cases)
    rows = [row(case) for case in cases]
    _csrc.choose_tokens(rows)
    assert {each.token for each in rows} == {0, 1, 2, 3, 5}


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_ranks_and_the_weight_of_all(vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab + count)
    for _ in range(6):
        case = Case(random_logits(rng, vocab), [0], PLAIN, int(rng.integers(2**32)))
        made = row(case, logprobs=count)
        _csrc.choose_tokens([made])
        likeliest, rank, total = made.ranked
        assert total == int(token_weights(case.logits, 1.0).sum())
        assert sorted(likeliest) == (top_k_ids(case.logits, count).tolist() if count else [])
        ranked = ranked_by_ids(case.logits, made.token, likeliest, rank, total)
        found = logprobs_of(made.token, ranked)
        assert found == token_logprobs(case.logits, made.token, count)


def test_biases_come_before_penalties_and_forbid() -> None:
    logits = np.array([1.0, 2.0, 3.0, -1.0], np.float32)
    halved = SamplingParams(temperature=0, repetition_penalty=2.0)
    greedy = SamplingParams(temperature=0)
    rows = [
        row(Case(logits, [2], halved, 0), biased=[2], biases=[0.9]),  # 3.9 / 2 < 2
        row(Case(logits, [2], halved, 0), biased=[2], biases=[1.1]),
        row(Case(logits, [0], greedy, 0), biased=[3, 2], biases=[4.5, -math.inf]),
        row(Case(logits, [0], greedy, 0), biased=range(4), biases=[-math.inf] * 4),
    ]
    _csrc.choose_tokens(rows)
    assert [(each.token, each.fault) for each in rows[:3]] == [(1, 0), (2, 0), (3, 0)]
    assert rows[3].fault == -1


def test_a_token_is_chosen_from_changed_logits_and_ranked_by_those_of_the_model() -> None:
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    changed = np.array([0.0, -np.inf, -np.inf], np.float32)
    made = row(Case(logits, [0], PLAIN, 0), changed, logprobs=1)
    _csrc.choose_tokens([made])
    assert (made.fault, made.token, made.ranked[:2]) == (0, 0, ([1], 3))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_nf02_at_the_edges_of_every_setting_the_first_of_the_largest_is_drawn(vocab: int, seed: int) -> None:
    """In C++ and in NumPy, at both ends of the vocabulary, with ties, and with logits of any size."""
    edges: list[dict[str, Any]] = [
        *({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.0}),
        {"temperature": 1e-8, "top_k": 1},
        {"temperature": 1e6, "top_p": 0.0},
    ]
    for best, at, by in itertools.product((1e-3, 3e38), (0, vocab - 1), edges):
        logits = np.full(vocab, -best, np.float32)
        logits[at:] = best
        case = Case(logits, [0], replace(PLAIN, **by), seed)
        made = row(case)
        _csrc.choose_tokens([made])
        if by.get("min_p") != 1.0:
            assert (made.fault, made.token) == (0, at), (best, by)
        assert (made.fault, made.token) == (0, sample_token(logits, [0], case.params, seed))
        assert at <= made.token < vocab


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_nf02_next_to_temperature_zero_the_only_largest_is_drawn(vocab: int, seed: int) -> None:
    for at in (0, vocab // 2, vocab - 1):
        logits = np.zeros(vocab, np.float32)
        logits[at] = 2e-6
        case = Case(logits, [0], replace(PLAIN, temperature=1e-8), seed)
        made = row(case)
        _csrc.choose_tokens([made])
        assert (made.fault, made.token) == (0, at)
        assert sample_token(logits, [0], case.params, seed) == at


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1.0])
def test_nf02_rows_without_a_number_or_a_token_are_faults(vocab: int, temperature: float) -> None:
    """Never a token: all NaN, and everything forbidden."""
    params = replace(PLAIN, temperature=temperature)
    for bad in (np.nan, np.inf, -np.inf):
        case = Case(np.full(vocab, bad, np.float32), [0], params, 0)
        made = row(case)
        _csrc.choose_tokens([made])
        assert made.fault == vocab
        with pytest.raises(GenerationFault, match=f"{vocab} of {vocab} logits"):
            sample_token(case.logits, [0], params, 0)
    good = np.zeros(vocab, np.float32)
    by_bias = row(Case(good, [0], params, 0), biased=range(vocab), biases=[-math.inf] * vocab)
    by_mask = row(Case(good, [0], params, 0), np.full(vocab, -np.inf, np.float32))
    _csrc.choose_tokens([by_bias, by_mask])
    assert (by_bias.fault, by_mask.fault) == (-1, -1)
    with pytest.raises(GenerationFault, match="no token can follow"):
        sample_token(good, [0], params, 0, set(range(vocab)))


def test_faults() -> None:
    good = np.zeros(300, np.float32)
    bad = good.copy()
    bad[[1, 63, 299]] = np.nan, np.inf, -np.inf
    huge = np.full(300, np.finfo(np.float32).max)
    boosted = SamplingParams(repetition_penalty=0.5)
    rows = [
        row(Case(good, [0], PLAIN, 0)),
        row(Case(bad, [0], boosted, 0)),
        row(Case(huge, [3], boosted, 0)),
        row(Case(good, [0], PLAIN, 0), np.where(np.arange(300) == 7, np.nan, good).astype(np.float32)),
        row(Case(good, [0], PLAIN, 0), np.full(300, -np.inf, np.float32)),
    ]
    _csrc.choose_tokens(rows)
    assert [each.fault for each in rows] == [0, 3, -1, -1, -1]


def test_what_does_not_fit_together_is_refused() -> None:
    case = Case(np.zeros(5, np.float32), [0], SamplingParams(repetition_penalty=2.0), 0)
    with pytest.raises(ValueError, match="one vocabulary"):
        row(case, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="token 5 is not of a vocabulary of 5"):
        row(case, recent=[5])
    with pytest.raises(ValueError, match="token -1"):
        row(case, biased=[-1], biases=[0.0])
    with pytest.raises(ValueError, match="each of biased"):
        row(case, biased=[1], biases=[])
    other = Case(np.zeros(6, np.float32), [0], PLAIN, 0)
    with pytest.raises(ValueError, match="of one vocabulary"):
        _csrc.choose_tokens([row(case), row(other)])
    with pytest.raises(TypeError):
        row(Case(np.zeros((5, 2), np.float32)[:, 0], [0], PLAIN, 0))
