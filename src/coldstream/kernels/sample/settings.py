"""The settings for the token after one row of logits; decoding's sampler defines each number."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_BIASED = 1024  # tokens with biases for which a device has room
NO_FINITE, BLOCKS_MISSED = -1, -2  # faults that are no number of logits
MASK_BITS = 32  # of a word

Bitmask = NDArray[np.uint32]
"""A bit for each token of a vocabulary: token i is bit i mod 32 of word ⌊i / 32⌋. Those beyond it are 0."""


def mask_words(vocab_size: int) -> int:
    """Words of a `Bitmask`."""
    return -(-vocab_size // MASK_BITS)


def bitmask_of(token_ids: Collection[int], vocab_size: int) -> Bitmask:
    """With the bits of these tokens."""
    is_in = np.zeros(MASK_BITS * mask_words(vocab_size), np.bool_)
    is_in[list(token_ids)] = True
    return np.packbits(is_in, bitorder="little").view(np.uint32)


@dataclass
class RowSettings:
    """Ranges are those of `SamplingParams`. Not frozen: making one is part of the time of every token."""

    temperature: float  # 0: the largest logit
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    recent: Sequence[int]  # ids of the tokens that penalties apply to; −1 − i: the device's result i
    seed: int  # below 2^64
    position: int  # of the new token in its sequence
    biased: Sequence[int] = ()  # ids of different tokens whose logits change before penalties
    biases: Sequence[float] = ()  # what is added to these; −inf forbids a token
    allowed: Bitmask | None = None  # the tokens that may follow, others have −inf after penalties; None: all
    logprobs: int | None = None  # this many of the likeliest tokens are wanted, and the chosen one's rank


@dataclass
class RankedTokens:
    """What log-probabilities of a row are made of: of its own logits, whatever the token is chosen by."""

    likeliest: Sequence[int]  # ids by rank, of equal logits the lowest first
    logits: Sequence[float]  # of these
    rank: int  # of the chosen token, from 1 on
    logit: float  # of the chosen token
    largest: float  # logit
    total: int  # weight of all tokens at temperature 1
