"""Drafters, which propose tokens for the model to verify."""

from coldstream.decoding.drafters.device_rounds import DeviceRounds, RoundDrafter
from coldstream.decoding.drafters.dflash import DflashDrafter
from coldstream.decoding.drafters.drafter import Drafter
from coldstream.decoding.drafters.mtp import MtpDrafter
from coldstream.decoding.drafters.ngram import NgramDrafter

__all__ = ["DeviceRounds", "DflashDrafter", "MtpDrafter", "NgramDrafter", "RoundDrafter", "with_rounds"]


def with_rounds(drafter: Drafter) -> RoundDrafter | None:
    """The drafter, if its device drafts and accepts by itself."""
    if isinstance(drafter, MtpDrafter | DflashDrafter) and drafter.runs_rounds:
        return drafter
    return None
