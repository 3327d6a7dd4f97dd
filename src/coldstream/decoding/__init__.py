"""Logits to tokens: sampling, stop strings, the autoregressive loop. Knows token ids, not tensors."""

from coldstream.decoding.autoregressive import Continuation, Progress, TargetModel, generate_tokens
from coldstream.decoding.choice import TokenChooser
from coldstream.decoding.logprobs import RankedLogprob
from coldstream.decoding.sampling import SEED_BITS, choose_token, derived_seed, sample_token
from coldstream.decoding.sampling_params import (
    AnyLogits,
    DeviceLogits,
    Logits,
    LogitsProcessor,
    SamplingParams,
)
from coldstream.decoding.stop import StopMatcher

__all__ = [
    "SEED_BITS",
    "AnyLogits",
    "Continuation",
    "DeviceLogits",
    "Logits",
    "LogitsProcessor",
    "Progress",
    "RankedLogprob",
    "SamplingParams",
    "StopMatcher",
    "TargetModel",
    "TokenChooser",
    "choose_token",
    "derived_seed",
    "generate_tokens",
    "sample_token",
]
