"""Drafters, which propose tokens for the model to verify."""

from coldstream.decoding.drafters.dflash import DflashDrafter
from coldstream.decoding.drafters.drafter import Drafter, FusedDrafter, FusedRun
from coldstream.decoding.drafters.mtp import MtpDrafter
from coldstream.decoding.drafters.ngram import NgramDrafter

__all__ = ["DflashDrafter", "FusedDrafter", "FusedRun", "MtpDrafter", "NgramDrafter", "with_fused_steps"]


def with_fused_steps(drafter: Drafter) -> FusedDrafter | None:
    """The drafter, if its device drafts and accepts by itself."""
    if isinstance(drafter, MtpDrafter | DflashDrafter) and drafter.has_fused_steps:
        return drafter
    return None
