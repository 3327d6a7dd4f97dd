"""Log-probabilities of tokens by the model's own logits.

ln p = (l − m) − ln(W / 2^40), in float64: l the token's logit, m the largest, W the sum of the weights of all
tokens at temperature 1 as `coldstream.decoding.sampling` defines them.
"""

import math
from collections.abc import Sequence

import numpy as np

from coldstream.decoding.sampling import WEIGHT_ONE, token_weights, top_k_ids
from coldstream.decoding.sampling_params import Logits
from coldstream.kernels.sample.settings import RankedTokens

RankedLogprob = tuple[int, float, int]  # token id, log-probability, rank


def token_logprobs(logits: Logits, chosen_id: int, count: int) -> list[RankedLogprob]:
    """The `count` likeliest tokens, and the chosen one if it is none of them, by rank.

    logits: finite float32 [vocab]. The likeliest token has rank 1; of equal ones the lowest id goes first.
    """
    return logprobs_of(chosen_id, ranked_tokens(logits, chosen_id, count))


def ranked_tokens(logits: Logits, chosen_id: int, count: int) -> RankedTokens:
    """What `token_logprobs` is made of."""
    ids = top_k_ids(logits, count) if count else np.empty(0, np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    total = int(token_weights(logits, 1.0).sum())
    return ranked_by_ids(logits, chosen_id, ids.tolist(), _rank(logits, chosen_id), total)


def ranked_by_ids(
    logits: Logits, chosen_id: int, likeliest: Sequence[int], rank: int, total: int
) -> RankedTokens:
    """`ranked_tokens`, if the ids of the likeliest tokens, the rank of the chosen one and the weight of all
    tokens are known.
    """
    found = logits[likeliest].tolist() if likeliest else []
    largest = found[0] if found else float(logits.max())
    return RankedTokens(likeliest, found, rank, float(logits[chosen_id]), largest, total)


def logprobs_of(chosen_id: int, ranked: RankedTokens) -> list[RankedLogprob]:
    """`token_logprobs`, by what it is made of."""
    log_total = math.log(ranked.total / WEIGHT_ONE)
    count = len(ranked.likeliest)
    found = list(zip(ranked.likeliest, ranked.logits, range(1, count + 1), strict=True))
    if ranked.rank > count:
        found.append((chosen_id, ranked.logit, ranked.rank))
    return [(token_id, logit - ranked.largest - log_total, rank) for token_id, logit, rank in found]


def _rank(logits: Logits, token_id: int) -> int:
    before = np.count_nonzero(logits > logits[token_id])
    return 1 + int(before + np.count_nonzero(logits[:token_id] == logits[token_id]))
