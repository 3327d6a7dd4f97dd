"""Logits to tokens: sampling, stop strings, the autoregressive loop. Knows token ids, not tensors."""

from coldstream.decoding.ahead import generate_tokens_ahead
from coldstream.decoding.autoregressive import Continuation, generate_tokens
from coldstream.decoding.choice import (
    Choice,
    Chosen,
    Outcome,
    StartedChoices,
    TokenChooser,
    begin_choices,
    choose_tokens,
)
from coldstream.decoding.device_logits import AnyLogits, DeviceChoice, DeviceLogits, DeviceStep
from coldstream.decoding.logprobs import RankedLogprob
from coldstream.decoding.sampling import SEED_BITS, derived_seed, sample_token
from coldstream.decoding.sampling_params import Logits, LogitsProcessor, SamplingParams
from coldstream.decoding.stop import StopMatcher

__all__ = [
    "SEED_BITS",
    "AnyLogits",
    "Choice",
    "Chosen",
    "Continuation",
    "DeviceChoice",
    "DeviceLogits",
    "DeviceStep",
    "Logits",
    "LogitsProcessor",
    "Outcome",
    "RankedLogprob",
    "SamplingParams",
    "StartedChoices",
    "StopMatcher",
    "TokenChooser",
    "begin_choices",
    "choose_tokens",
    "derived_seed",
    "generate_tokens",
    "generate_tokens_ahead",
    "sample_token",
]
