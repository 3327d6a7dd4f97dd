"""What decides the token that follows one row of logits; decoding's sampler says what each number means."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowSettings:
    """Ranges are those of `SamplingParams`."""

    temperature: float  # 0: the largest logit
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    recent: Sequence[int]  # the tokens that penalties are for, ids of the vocabulary; none: no penalties
    seed: int  # below 2^64
    position: int  # that the token will have in its sequence
