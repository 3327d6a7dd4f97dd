"""Log-probabilities of tokens by the model's own logits.

ln p = (l − m) − ln(W / 2^40), in float64: l the token's logit, m the largest, W the sum of the weights of all
tokens at temperature 1 as `coldstream.decoding.sampling` defines them.
"""

import math
from collections.abc import Sequence

import numpy as np

from coldstream.decoding.sampling import WEIGHT_ONE, token_weights, top_k_ids
from coldstream.decoding.sampling_params import Logits

RankedLogprob = tuple[int, float, int]  # token id, log-probability, rank


def token_logprobs(logits: Logits, chosen_id: int, count: int) -> list[RankedLogprob]:
    """The `count` likeliest tokens, and the chosen one if it is none of them, by rank.

    logits: finite float32 [vocab]. The likeliest token has rank 1; of equal ones the lowest id goes first.
    """
    ids = top_k_ids(logits, count) if count else np.empty(0, np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    total = int(token_weights(logits, 1.0).sum())
    return logprobs_of_ranks(logits, chosen_id, ids.tolist(), _rank(logits, chosen_id), total)


def logprobs_of_ranks(
    logits: Logits, chosen_id: int, likeliest: Sequence[int], rank: int, total: int
) -> list[RankedLogprob]:
    """`token_logprobs`, if the ids of the likeliest tokens, the rank of the chosen one and the weight of all
    tokens are known.
    """
    log_total = math.log(total / WEIGHT_ONE)
    ranked = list(zip(likeliest, range(1, len(likeliest) + 1), strict=True))
    if rank > len(likeliest):
        ranked.append((chosen_id, rank))
    largest = float(logits[likeliest[0]] if likeliest else logits.max())
    return [(token_id, float(logits[token_id]) - largest - log_total, rank) for token_id, rank in ranked]


def _rank(logits: Logits, token_id: int) -> int:
    before = np.count_nonzero(logits > logits[token_id])
    return 1 + int(before + np.count_nonzero(logits[:token_id] == logits[token_id]))
