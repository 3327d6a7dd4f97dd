"""Log-probabilities of tokens by the model's own logits.

ln p = (l − m) − ln(W / 2^40), in float64: l the token's logit, m the largest, W the sum of the weights of all
tokens at temperature 1 as `coldstream.decoding.sampling` defines them.
"""

import math

import numpy as np

from coldstream.decoding.sampling import WEIGHT_ONE, token_weights, top_k_ids
from coldstream.decoding.sampling_params import Logits

RankedLogprob = tuple[int, float, int]  # token id, log-probability, rank


def token_logprobs(logits: Logits, chosen_id: int, count: int) -> list[RankedLogprob]:
    """The `count` likeliest tokens, and the chosen one if it is none of them, by rank.

    logits: finite float32 [vocab]. The likeliest token has rank 1; of equal ones the lowest id goes first.
    """
    largest = logits.max()
    log_total = math.log(int(token_weights(logits, 1.0).sum()) / WEIGHT_ONE)
    ids = top_k_ids(logits, count) if count else np.empty(0, np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    ranked = [(int(token_id), rank) for rank, token_id in enumerate(ids, start=1)]
    if chosen_id not in ids:
        ranked.append((chosen_id, _rank(logits, chosen_id)))
    return [
        (token_id, float(np.float64(logits[token_id]) - np.float64(largest)) - log_total, rank)
        for token_id, rank in ranked
    ]


def _rank(logits: Logits, token_id: int) -> int:
    before = np.count_nonzero(logits > logits[token_id])
    return 1 + int(before + np.count_nonzero(logits[:token_id] == logits[token_id]))
