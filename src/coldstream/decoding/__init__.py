"""Logits to tokens: sampling, stop strings, the autoregressive loop. Knows token ids, not tensors."""

from coldstream.decoding.autoregressive import Progress, TargetModel, generate_tokens
from coldstream.decoding.sampling import choose_token, sample_token
from coldstream.decoding.sampling_params import (
    AnyLogits,
    DeviceLogits,
    Logits,
    LogitsProcessor,
    SamplingParams,
)
from coldstream.decoding.stop import StopMatcher

__all__ = [
    "AnyLogits",
    "DeviceLogits",
    "Logits",
    "LogitsProcessor",
    "Progress",
    "SamplingParams",
    "StopMatcher",
    "TargetModel",
    "choose_token",
    "generate_tokens",
    "sample_token",
]
