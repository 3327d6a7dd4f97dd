"""The sampler against its written definition, by properties, known answers and goodness of fit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from coldstream.decoding.sampling import (
    WEIGHT_ONE,
    apply_penalties,
    derived_seed,
    draw_token,
    keep_tokens,
    philox4x32,
    random_bits,
    recent_tokens,
    sample_token,
    token_weights,
)
from coldstream.decoding.sampling_params import Logits, SamplingParams
from coldstream.errors import GenerationFault, InvalidRequestError

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

# Few distinct values, so that ties are common.
logit_vectors = st.lists(
    st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32)), min_size=1, max_size=40
).map(lambda values: np.array(values, dtype=np.float32))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == words


def test_random_bits_depend_on_every_half_of_seed_and_position() -> None:
    inputs = [(0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**32), (2**64 - 1, 2**40)]
    assert len({random_bits(seed, position) for seed, position in inputs}) == len(inputs)
    assert all(0 <= random_bits(seed, position) < 2**64 for seed, position in inputs)


@given(logit_vectors, st.floats(0.05, 10))
def test_weights_are_the_softmax(logits: Logits, temperature: float) -> None:
    weights = token_weights(logits, temperature)
    assert weights.max() == WEIGHT_ONE
    exact = [math.exp((float(logit) - float(logits.max())) / temperature) for logit in logits]
    np.testing.assert_allclose(weights / WEIGHT_ONE, exact, rtol=1e-14, atol=2 / WEIGHT_ONE)


@given(logit_vectors)
def test_temperature_zero_takes_the_lowest_id_of_the_largest(logits: Logits) -> None:
    token_id = sample_token(logits, [0], replace(PLAIN, temperature=0.0), seed=7)
    assert token_id == min(i for i in range(len(logits)) if logits[i] == logits.max())


@given(logit_vectors, st.integers(1, 45))
def test_top_k_keeps_the_k_largest_with_ties_to_the_lowest_id(logits: Logits, k: int) -> None:
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert keep_tokens(logits, replace(PLAIN, top_k=k)).tolist() == sorted(ranked[:k])


@given(logit_vectors, st.floats(0, 1, exclude_max=True), st.floats(0, 1), st.integers(0, 45))
def test_filters_keep_what_the_definition_says(
    logits: Logits, top_p: float, min_p: float, top_k: int
) -> None:
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = dict(zip(ranked, token_weights(logits[ranked], 1.0).tolist(), strict=True))
    bound = int(top_p * 2.0**64) * sum(weights.values()) >> 64
    before, expected = 0, []
    for rank, token_id in enumerate(ranked):
        if (rank == 0 or before < bound) and 2**40 * min_p <= weights[token_id] > 0:
            expected.append(token_id)
        before += weights[token_id]
    params = replace(PLAIN, top_p=top_p, min_p=min_p, top_k=top_k)
    assert keep_tokens(logits, params).tolist() == sorted(expected)


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.99])
def test_top_p_beyond_the_first_sort_keeps_what_the_definition_says(top_p: float) -> None:
    logits = np.random.default_rng(8).integers(0, 3, size=20_000).astype(np.float32)
    ranked = np.lexsort((np.arange(len(logits)), -logits))
    weights = token_weights(logits, 1.0)[ranked]
    bound = int(top_p * 2.0**64) * int(weights.sum()) >> 64
    expected = np.sort(ranked[np.cumsum(weights) - weights < bound])
    assert len(expected) > 1024
    assert (keep_tokens(logits, replace(PLAIN, top_p=top_p)) == expected).all()


@given(logit_vectors, st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.floats(0.1, 5))
def test_a_draw_is_a_pure_function_of_seed_and_position(
    logits: Logits, seed: int, position: int, temperature: float
) -> None:
    ids, before = np.arange(len(logits)), logits.copy()
    bits = random_bits(seed, position)
    drawn = draw_token(ids, logits, temperature, bits)
    assert drawn == draw_token(ids, logits, temperature, random_bits(seed, position))
    assert token_weights(logits, temperature)[drawn] > 0
    assert (logits == before).all()


def test_the_extreme_draws_stay_in_range() -> None:
    ids, logits = np.arange(3), np.zeros(3, dtype=np.float32)
    assert draw_token(ids, logits, 1.0, 0) == 0
    assert draw_token(ids, logits, 1.0, 2**64 - 1) == 2


def test_position_is_the_length_of_the_context() -> None:
    logits = np.zeros(64, dtype=np.float32)
    drawn = [sample_token(logits, [5] * length, PLAIN, seed=3) for length in range(1, 20)]
    expected = [draw_token(np.arange(64), logits, 1.0, random_bits(3, length)) for length in range(1, 20)]
    assert drawn == expected
    assert len(set(drawn)) > 5


@given(logit_vectors, st.lists(st.integers(0, 39), max_size=80), st.integers(0, 20))
def test_penalties_follow_their_formula(logits: Logits, context: list[int], last_n: int) -> None:
    context = [token_id % len(logits) for token_id in context]
    params = replace(
        PLAIN,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repeat_last_n=last_n or None,
    )
    window = context[-last_n:]
    for token_id, penalised in enumerate(apply_penalties(logits, context, params)):
        expected = float(logits[token_id])
        if count := window.count(token_id):
            expected = expected / 1.5 if expected > 0 else expected * 1.5
            expected -= 0.25 * count + 0.5
        assert penalised == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(logit_vectors, st.lists(st.integers(0, 0), max_size=5))
def test_neutral_penalties_change_nothing(logits: Logits, context: list[int]) -> None:
    assert not PLAIN.has_penalties
    assert not replace(PLAIN, repetition_penalty=2.0, repeat_last_n=0).has_penalties
    assert (apply_penalties(logits, context, PLAIN) == logits).all()


def test_penalties_come_before_the_argmax() -> None:
    logits = np.array([3.0, 2.0, 1.0], dtype=np.float32)
    params = replace(PLAIN, temperature=0.0, presence_penalty=1.5)
    assert sample_token(logits, [0], params, seed=0) == 1


def test_biases_are_added_before_penalties() -> None:
    logits = np.array([-1.0, 2.0, 4.0], dtype=np.float32)
    greedy = replace(PLAIN, temperature=0.0)
    assert sample_token(logits, [1], replace(greedy, logit_bias={0: 6.0}), seed=0) == 0
    # A penalty divides the positive logit that the bias has made; a negative one it would multiply.
    params = replace(greedy, logit_bias={0: 9.0}, repetition_penalty=4.0)
    assert sample_token(logits, [0], params, seed=0) == 2
    assert logits[0] == -1.0


def test_logits_processors_run_in_order_and_may_forbid() -> None:
    def forbid_zero(context: object, logits: Logits) -> Logits:
        return np.concatenate([np.array([-np.inf], dtype=np.float32), logits[1:]])

    def double(context: object, logits: Logits) -> Logits:
        return 2 * logits

    logits = np.array([9.0, 1.0, 2.0], dtype=np.float32)
    params = replace(PLAIN, logits_processors=(forbid_zero, double))
    assert {sample_token(logits, [0] * n, params, seed=1) for n in range(1, 60)} == {1, 2}
    assert sample_token(logits, [0], replace(params, temperature=0.0), seed=1) == 2


def _g_statistic(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    seen = counts > 0
    return float(2 * (counts[seen] * np.log(counts[seen] / expected[seen])).sum())


def _g_limit(num_cells: int) -> float:
    """Wilson–Hilferty approximation of the chi-squared quantile that is exceeded with probability 1e-6."""
    freedom = num_cells - 1
    return freedom * (1 - 2 / (9 * freedom) + 4.7534 * math.sqrt(2 / (9 * freedom))) ** 3


def _draw_counts(logits: Logits, params: SamplingParams, num_draws: int) -> NDArray[np.int64]:
    kept = keep_tokens(logits, params)
    bits = (random_bits(1234, position) for position in range(num_draws))
    drawn = [draw_token(kept, logits[kept], params.temperature, b) for b in bits]
    return np.bincount(drawn, minlength=len(logits))


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize(("temperature", "num_draws"), [(0.7, 20_000), (1.0, 40_000), (1.6, 20_000)])
def test_sp05_draws_fit_the_distribution(temperature: float, num_draws: int) -> None:
    logits = np.random.default_rng(5).normal(size=24).astype(np.float32)
    counts = _draw_counts(logits, replace(PLAIN, temperature=temperature), num_draws)
    probabilities = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    probabilities /= probabilities.sum()
    assert (probabilities * num_draws).min() >= 20
    assert _g_statistic(counts, probabilities) < _g_limit(24)


def test_sp05_the_goodness_of_fit_notices_a_small_bias() -> None:
    logits = np.random.default_rng(5).normal(size=24).astype(np.float32)
    counts = _draw_counts(logits, PLAIN, 20_000)
    biased = np.exp(logits.astype(np.float64) / 1.1)
    assert _g_statistic(counts, biased / biased.sum()) > _g_limit(24)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trap_50_logits_that_are_not_finite_are_a_fault(bad: float, temperature: float) -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[63] = bad
    with pytest.raises(GenerationFault, match="1 of 100 logits at position 2 are not finite"):
        sample_token(logits, [0, 1], replace(PLAIN, temperature=temperature), seed=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_trap_50_a_processor_that_leaves_no_token_is_a_fault(bad: float) -> None:
    def ruin(context: object, logits: Logits) -> Logits:
        return np.full_like(logits, bad)

    with pytest.raises(GenerationFault, match="no token can follow at position 1"):
        sample_token(np.zeros(4, dtype=np.float32), [0], replace(PLAIN, logits_processors=(ruin,)), seed=0)


@given(logit_vectors, st.lists(st.integers(0, 39), max_size=45), st.integers(0, 2**64 - 1))
def test_a_forbidden_token_is_as_if_its_logit_were_minus_infinity(
    logits: Logits, ids: list[int], seed: int
) -> None:
    forbidden = {token_id % len(logits) for token_id in ids}
    before = logits.copy()

    def forbid(context: Sequence[int], values: Logits) -> Logits:
        return np.where(np.isin(np.arange(len(values)), list(forbidden)), -np.inf, values).astype(np.float32)

    params = SamplingParams(temperature=0.7, repetition_penalty=1.2, top_k=5)
    if len(forbidden) == len(logits):
        with pytest.raises(GenerationFault, match="no token can follow"):
            sample_token(logits, [0], params, seed, forbidden)
        return
    token_id = sample_token(logits, [0], params, seed, forbidden)
    assert token_id not in forbidden
    assert token_id == sample_token(logits, [0], replace(params, logits_processors=(forbid,)), seed)
    assert (logits == before).all()


def test_a_processor_may_write_into_what_it_is_given() -> None:
    def forbid_best(context: Sequence[int], values: Logits) -> Logits:
        values[np.argmax(values)] = -np.inf
        return values

    logits = np.array([9.0, 1.0, 2.0], dtype=np.float32)
    params = SamplingParams(temperature=0, logits_processors=[forbid_best, forbid_best])
    assert sample_token(logits, [0], params, 0) == 1
    assert logits.tolist() == [9.0, 1.0, 2.0]


def fail(context: Sequence[int], values: Logits) -> Logits:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (fail, r"logits_processors\[1\] \('fail'\) raised KeyError: 'lost'"),
        (lambda context, values: None, r"logits_processors\[1\] .* returned a NoneType, not an array"),
        (lambda context, values: values.tolist(), r"returned a list, not an array"),
        (lambda context, values: values[1:], r"returned float32 of shape \(2,\), not float32 of \(3,\)"),
        (lambda context, values: values.astype(np.float64), r"returned float64 of shape \(3,\)"),
        (lambda context: context, r"raised TypeError"),
    ],
    ids=["raises", "none", "list", "shape", "dtype", "arguments"],
)
def test_a_processor_that_misbehaves_is_named(processor: Any, message: str) -> None:
    def sound(context: Sequence[int], values: Logits) -> Logits:
        return values

    params = SamplingParams(logits_processors=(sound, processor))
    with pytest.raises(InvalidRequestError, match=message):
        sample_token(np.zeros(3, np.float32), [0], params, 0)


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1))
def test_derived_seeds_differ_by_index_and_fit_into_json(seed: int, index: int, other: int) -> None:
    assert derived_seed(seed, 0) == seed
    assert 0 <= derived_seed(seed, index) < 2**53
    assert (derived_seed(seed, index) == derived_seed(seed, other)) == (index == other)


def test_derived_seeds_known_answers() -> None:
    words = philox4x32((3, 0, 1, 0), (7, 1))
    assert derived_seed(7 + 2**32, 3) == (words[0] + words[1] * 2**32) % 2**53
    assert derived_seed(0, 1) != random_bits(0, 1) % 2**53


@given(st.integers(0, 6), st.integers(0, 2**64 - 1))
def test_equal_logits_share_the_numbers_equally(log_count: int, bits: int) -> None:
    """Each of 2^n tokens is drawn by 2^(64 − n) of the 64-bit numbers, those in turn, to the last one."""
    count = 1 << log_count
    ids, logits = np.arange(count) * 3, np.zeros(count, np.float32)
    share = 2**64 >> log_count
    first = bits // share * share
    for number in (first, bits, first + share - 1):
        assert draw_token(ids, logits, 1.0, number) == 3 * (first // share)


@given(st.integers(0, 11), st.data())
def test_top_p_stops_where_the_sum_is_reached_exactly(log_count: int, data: st.DataObject) -> None:
    count = 1 << log_count
    num_kept = data.draw(st.integers(0, count - 1))
    params = replace(PLAIN, top_p=num_kept / count)
    kept = keep_tokens(np.zeros(count, np.float32), params)
    assert kept.tolist() == list(range(max(1, num_kept)))


@given(st.lists(st.integers(0, 9), max_size=12), st.none() | st.integers(0, 14))
def test_penalties_are_for_the_last_tokens(context: list[int], window: int | None) -> None:
    """Of a context that is shorter than the window, as long, or longer."""
    count = len(context) if window is None else min(window, len(context))
    params = replace(PLAIN, presence_penalty=1.0, repeat_last_n=window)
    assert list(recent_tokens(context, params)) == context[len(context) - count :]
    assert list(recent_tokens(context, replace(params, presence_penalty=0.0))) == []
