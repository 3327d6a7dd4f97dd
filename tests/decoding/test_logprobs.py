"""Log-probabilities against the softmax, and their order."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.logprobs import token_logprobs
from coldstream.decoding.sampling_params import Logits

# Few distinct values, so that ties are common.
logit_vectors = st.lists(
    st.one_of(st.integers(-4, 4).map(float), st.floats(-60, 30, width=32)), min_size=1, max_size=40
).map(lambda values: np.array(values, dtype=np.float32))


@given(logit_vectors, st.integers(0, 45), st.integers(0, 39))
def test_they_are_those_of_the_softmax_by_rank(logits: Logits, count: int, chosen: int) -> None:
    chosen %= len(logits)
    log_total = math.log(math.fsum(math.exp(float(logit)) for logit in logits))
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    expected = ranked[:count] + ([] if chosen in ranked[:count] else [chosen])
    found = token_logprobs(logits, chosen, count)
    assert [token_id for token_id, _, _ in found] == expected
    assert [rank for _, _, rank in found] == [ranked.index(token_id) + 1 for token_id in expected]
    for token_id, logprob, _ in found:
        assert math.isclose(logprob, float(logits[token_id]) - log_total, rel_tol=1e-6, abs_tol=1e-9)


def test_all_of_them_sum_to_one() -> None:
    logits = np.random.default_rng(3).normal(size=1000).astype(np.float32) * 4
    found = token_logprobs(logits, 0, 1000)
    assert len(found) == 1000
    assert math.isclose(math.fsum(math.exp(logprob) for _, logprob, _ in found), 1, rel_tol=1e-9)


def test_of_equal_tokens_the_lowest_id_goes_first() -> None:
    logits = np.array([0.0, 1.0, 0.0, 1.0, 0.0], np.float32)
    assert [(token_id, rank) for token_id, _, rank in token_logprobs(logits, 4, 3)] == [
        (1, 1),
        (3, 2),
        (0, 3),
        (4, 5),
    ]
    assert [rank for _, _, rank in token_logprobs(logits, 2, 0)] == [4]
