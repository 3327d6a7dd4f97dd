"""The settings for the token after one row of logits; decoding's sampler defines each number."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_BIASED = 1024  # tokens with biases for which a device has room


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
