"""Logits to tokens: sampling, stop strings, the autoregressive loop. Knows token ids, not tensors."""

from coldstream.decoding.autoregressive import Progress, TargetModel, generate_tokens
from coldstream.decoding.sampling import sample_token
from coldstream.decoding.sampling_params import Logits, LogitsProcessor, SamplingParams
from coldstream.decoding.stop import StopMatcher

__all__ = [
    "Logits",
    "LogitsProcessor",
    "Progress",
    "SamplingParams",
    "StopMatcher",
    "TargetModel",
    "generate_tokens",
    "sample_token",
]
