"""Logits to tokens: sampling, stop strings, the autoregressive loop. Knows token ids, not tensors."""

from coldstream.decoding.autoregressive import Continuation, Progress, TargetModel, generate_tokens
from coldstream.decoding.choice import Choice, Chosen, Outcome, TokenChooser, choose_tokens
from coldstream.decoding.device_logits import AnyLogits, DeviceLogits, DeviceStep
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
    "DeviceLogits",
    "DeviceStep",
    "Logits",
    "LogitsProcessor",
    "Outcome",
    "Progress",
    "RankedLogprob",
    "SamplingParams",
    "StopMatcher",
    "TargetModel",
    "TokenChooser",
    "choose_tokens",
    "derived_seed",
    "generate_tokens",
    "sample_token",
]
