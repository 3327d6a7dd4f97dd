"""Drafters, which propose tokens for the model to verify."""

from coldstream.decoding.drafters.dflash import DflashDrafter
from coldstream.decoding.drafters.mtp import DeviceRounds, MtpDrafter
from coldstream.decoding.drafters.ngram import NgramDrafter

__all__ = ["DeviceRounds", "DflashDrafter", "MtpDrafter", "NgramDrafter"]
