"""From logits to a token: penalties, filters, and a draw that is a pure function of (seed, position).

Everything works on one float32 vector [vocab] and returns the same token on any machine, because the draw is
integer arithmetic. This is the definition that a faster version has to reproduce:

1. *Weight* of a token with logit l, relative to the largest logit m, at temperature T, in float64, every
   operation rounded on its own: x = (l − m) / T; 0 if x < −28; otherwise ⌊2^40 · exp(x)⌋ with exp as in
   `_exp`. The largest logit weighs 2^40, and sums of weights are exact in int64 in any order.
2. *top-k* keeps the k largest logits, of equal ones the lowest ids.
3. *top-p* orders these by (logit descending, id ascending) and keeps a token if the weights (T = 1) of those
   before it sum to less than high64(⌊p · 2^64⌋ · total), total being the weight of all kept by top-k; the
   first always stays. high64(a · b) is ⌊a · b / 2^64⌋.
4. *min-p* keeps weights (T = 1) of at least min_p · 2^40; where top-p or min-p is on, a weight of 0 goes too.
5. *Draw*: with weights at temperature T, total W, and a 64-bit r, the token is the first, by ascending id, at
   which the running sum exceeds high64(r · W).
6. r = w0 + 2^32 · w1 of Philox4x32-10 with the key (seed mod 2^32, ⌊seed / 2^32⌋) and the counter (position
   mod 2^32, ⌊position / 2^32⌋, 0, 0). The position is the index that the new token will have in its sequence.

Temperature 0 takes the largest logit. Ties always go to the lowest id.

Before that, a logit is changed by its bias, then by penalties, then by logits processors. It is set to −inf
where the token is not among the allowed ones, as a grammar says, or forbidden. Answers after a prompt's first
draw with seeds of their own, see `derived_seed`.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coldstream.decoding.sampling_params import Logits, LogitsProcessor, SamplingParams
from coldstream.errors import GenerationFault, InvalidRequestError, shown
from coldstream.kernels.sample.settings import Bitmask
from coldstream.models.spec.sanity import check_logits

WEIGHT_ONE = 2**40
_MIN_EXPONENT = -28.0  # exp(−28) < 2^−40: beyond it every weight is 0
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 6.93147180369123816490e-01  # the upper 32 bits of ln 2, so that n · _LN2_HIGH is exact
_LN2_LOW = 1.90821492927058770002e-10
_EXP_COEFFICIENTS = tuple(
    1.0 / factorial
    for factorial in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1)
)
SEED_BITS = 53  # bits of a seed that is not the caller's, as many as a number in JSON holds
_FIRST_SORT = 1024
_MASK32 = 2**32 - 1


def sample_token(
    logits: Logits,
    context: Sequence[int],
    params: SamplingParams,
    seed: int,
    forbidden_ids: Collection[int] = (),
    allowed: Bitmask | None = None,
) -> int:
    """The token that follows `context` (all ids so far) given the model's float32 `logits` [vocab].

    Never one of `forbidden_ids`, and one of those that are `allowed`; None: all are. Pure: the arguments are
    not changed, and `params.seed` is ignored in favour of `seed`. Raises GenerationFault if a logit is not
    finite, or if no token is left, InvalidRequestError if a logits processor raises or returns something else
    than logits.
    """
    logits = changed_logits(logits, context, params, forbidden_ids, allowed)
    best = int(np.argmax(logits))  # the first NaN if there is one
    if not np.isfinite(logits[best]):
        raise no_token_left(len(context))
    if params.temperature == 0:
        return best
    kept = keep_tokens(logits, params)
    return draw_token(kept, logits[kept], params.temperature, random_bits(seed, len(context)))


def changed_logits(
    logits: Logits,
    context: Sequence[int],
    params: SamplingParams,
    forbidden_ids: Collection[int],
    allowed: Bitmask | None = None,
) -> Logits:
    """The logits [vocab] after biases, penalties, processors and forbidden tokens, from which `sample_token`
    chooses; the given ones are not changed. Raises as `sample_token`.
    """
    check_logits(logits, len(context))
    if params.logit_bias:
        logits = _biased(logits, params.logit_bias)
    if params.has_penalties:
        logits = apply_penalties(logits, context, params)
    if params.logits_processors:
        logits = _processed(logits, context, params.logits_processors)
    if allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), count=len(logits), bitorder="little")
        logits = np.where(bits, logits, np.float32(-np.inf))
    if forbidden_ids:
        logits = logits.copy()
        logits[list(forbidden_ids)] = -np.inf
    return logits


def no_token_left(position: int) -> GenerationFault:
    """The error if penalties, processors, masks or forbidden tokens leave no finite logit on top."""
    return GenerationFault(f"no token can follow at position {position}: the best logit is not finite")


def recent_tokens(context: Sequence[int], params: SamplingParams) -> Sequence[int]:
    """The last tokens of `context`, which penalties are for; none if no penalty changes a logit."""
    if not params.has_penalties:
        return ()
    return context if params.repeat_last_n is None else context[-params.repeat_last_n :]


def apply_penalties(logits: Logits, context: Sequence[int], params: SamplingParams) -> Logits:
    """A copy of `logits` [vocab] in which the `recent_tokens` are less likely.

    Positive logits are divided by the repetition penalty, others multiplied; then presence + count ·
    frequency is subtracted; all in float32. A function of the last tokens alone, so it can be asked at any
    node of a draft tree.
    """
    recent = np.asarray(recent_tokens(context, params), dtype=np.int64)
    ids, counts = np.unique(recent, return_counts=True)
    seen = logits[ids]
    repetition = np.float32(params.repetition_penalty)
    with np.errstate(over="ignore"):
        seen = np.where(seen > 0, seen / repetition, seen * repetition)
    seen -= counts.astype(np.float32) * np.float32(params.frequency_penalty) + np.float32(
        params.presence_penalty
    )
    penalised = logits.copy()
    penalised[ids] = seen
    return penalised


def keep_tokens(logits: Logits, params: SamplingParams) -> NDArray[np.int64]:
    """Ids that survive top-k, top-p and min-p, ascending; never empty."""
    kept = top_k_ids(logits, params.top_k)
    if params.top_p == 1 and params.min_p == 0:
        return kept
    weights = token_weights(logits[kept], 1.0)
    total = int(weights.sum())
    # min-p goes first, as it leaves less to sort: both keep a prefix of the same order.
    alive = weights >= max(1, int(np.ceil(params.min_p * WEIGHT_ONE)))
    kept, weights = kept[alive], weights[alive]
    if params.top_p == 1:
        return kept
    first = _first_by_rank(logits[kept], weights, _high64(int(params.top_p * 2.0**64), total))
    return kept[np.sort(first)]


def draw_token(ids: NDArray[np.int64], logits: Logits, temperature: float, bits: int) -> int:
    """One of ascending `ids`, whose logits are `logits`, chosen by the 64-bit number `bits`."""
    sums = np.cumsum(token_weights(logits, temperature))
    return int(ids[np.searchsorted(sums, _high64(bits, int(sums[-1])), side="right")])


def token_weights(logits: Logits, temperature: float) -> NDArray[np.int64]:
    """⌊2^40 · exp((l − max) / T)⌋ for each logit: int64, the largest exactly 2^40. At least one must be
    finite.
    """
    with np.errstate(over="ignore"):
        exponents = (logits.astype(np.float64) - np.float64(logits.max())) / temperature
    weights = np.zeros(len(logits), dtype=np.int64)
    alive = exponents >= _MIN_EXPONENT
    weights[alive] = np.floor(_exp(exponents[alive]) * WEIGHT_ONE).astype(np.int64)
    return weights


def random_bits(seed: int, position: int) -> int:
    """64 uniform bits for the token at `position`, a pure function of its arguments (both below 2^64)."""
    counter = (position & _MASK32, position >> 32, 0, 0)
    words = philox4x32(counter, (seed & _MASK32, seed >> 32))
    return words[0] | words[1] << 32


def derived_seed(seed: int, index: int) -> int:
    """The seed of answer `index` (below 2^32) to a prompt whose first answer has `seed`, which is that of 0.

    The lower 53 bits, so that it survives a trip through JSON, of w0 + 2^32 · w1 of Philox4x32-10 with the
    key of `seed` and the counter (index, 0, 1, 0), which no draw uses.
    """
    if index == 0:
        return seed
    words = philox4x32((index, 0, 1, 0), (seed & _MASK32, seed >> 32))
    return (words[0] | words[1] << 32) & ((1 << SEED_BITS) - 1)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def _first_by_rank(logits: Logits, weights: NDArray[np.int64], bound: int) -> NDArray[np.int64]:
    """Indices by (logit descending, index ascending) as long as the weights before one sum to less than
    `bound`.

    At least one. Sorts only as many of the largest logits as that takes.
    """
    num_sorted = _FIRST_SORT
    while True:
        largest = top_k_ids(logits, num_sorted)
        order = largest[np.argsort(-logits[largest], kind="stable")]
        sums = np.cumsum(weights[order])
        if len(order) == len(logits) or sums[-1] >= bound:
            break
        num_sorted *= 16
    num_kept = int(np.count_nonzero(sums - weights[order] < bound))
    return order[: max(1, num_kept)]


def top_k_ids(logits: Logits, k: int) -> NDArray[np.int64]:
    """Ids of the k largest logits, of equal ones the lowest, ascending; all of them for k = 0."""
    if not 0 < k < len(logits):
        return np.arange(len(logits))
    threshold = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > threshold)
    ties = np.flatnonzero(logits == threshold)[: k - len(above)]
    return np.sort(np.concatenate([above, ties]))


def _exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp for −28 ≤ x ≤ 0: n = rint(x · log2 e), t = (x − n · hi) − n · lo, Horner from 1/12! down, times
    2^n.
    """
    n = np.rint(x * _LOG2_E)
    t = (x - n * _LN2_HIGH) - n * _LN2_LOW
    result = np.full_like(t, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        result *= t
        result += coefficient
    return np.ldexp(result, n.astype(np.int32))


def _high64(a: int, b: int) -> int:
    return a * b >> 64


def _biased(logits: Logits, biases: Mapping[int, float] | Sequence[tuple[int, float]]) -> Logits:
    """A copy of `logits` [vocab] with the biases of some tokens added in float32."""
    pairs = dict(biases)
    biased = logits.copy()
    biased[list(pairs)] += np.fromiter(pairs.values(), np.float32, len(pairs))
    return biased


def _processed(logits: Logits, context: Sequence[int], processors: Sequence[LogitsProcessor]) -> Logits:
    """A copy of `logits` [vocab] after all processors."""
    context = tuple(context)
    processed = logits.copy()
    for index, processor in enumerate(processors):
        name = f"logits_processors[{index}] ({shown(getattr(processor, '__name__', processor))})"
        try:
            processed = processor(context, processed)
        except InvalidRequestError:
            raise
        except Exception as error:
            raise InvalidRequestError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(processed, np.ndarray):
            raise InvalidRequestError(f"{name} returned a {type(processed).__name__}, not an array of logits")
        if processed.shape != logits.shape or processed.dtype != np.float32:
            raise InvalidRequestError(
                f"{name} returned {processed.dtype} of shape {processed.shape}, not float32 of {logits.shape}"
            )
    return processed
