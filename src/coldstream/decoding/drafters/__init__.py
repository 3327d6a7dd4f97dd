"""Drafters, which propose tokens for the model to verify."""

from coldstream.decoding.drafters.mtp import MtpDrafter
from coldstream.decoding.drafters.ngram import NgramDrafter

__all__ = ["MtpDrafter", "NgramDrafter"]
