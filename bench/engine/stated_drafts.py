"""Drafters that run as in the product, whose tokens are then replaced by the right ones as often as stated.

For files of `full_size_model.py`: the greedy text walks through the vocabulary, so that the right tokens are
known. All that drafting costs is paid. A draft that is not right has tokens from `FIRST_ID` on, from which no
timed text may be near.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from coldstream.decoding import TokenTree
from coldstream.decoding.drafters import DflashDrafter, MtpDrafter

# The share of positions whose token is right, by depth. MTP: llama.cpp's of the 35B at temperature 0.6.
# DFlash 2: over drafts of 3, 4, 5 and 7 tokens 70, 60, 54 and 41 % are right there, as many as of these.
ACCEPTED: Final = {"mtp": (0.80, 0.70, 0.63), "dflash": (0.86, 0.70, 0.54, 0.32, 0.28, 0.10, 0.07)}
FIRST_ID: Final = 1000
MAX_DEPTH: Final = 16


@dataclass(frozen=True)
class Acceptance:
    """How often drafted tokens are right; deeper ones as often as the last one, given the one before."""

    accepted: tuple[float, ...]  # by depth

    def chances(self) -> list[float]:
        """Of the token at each depth to be right, given that those before it are."""
        given = [b / a if a else 0.0 for a, b in zip((1.0, *self.accepted), self.accepted, strict=False)]
        return given + [given[-1]] * (MAX_DEPTH - len(given))

    def right_depths(self, position: int) -> int:
        """How many tokens of a draft after a root at `position` are right: of position alone."""
        random, count = Random(1 + position), 0
        for chance in self.chances():
            if random.random() >= chance:
                break
            count += 1
        return count

    def draft(self, context: Sequence[int], most: int) -> TokenTree:
        """A chain after a text of the walk."""
        given, count = self.chances(), min(most, MAX_DEPTH)
        num_right = self.right_depths(len(context) - 1)
        token_ids = [(context[-1] + 1 if depth < num_right else FIRST_ID) + depth for depth in range(count)]
        logs = [math.log(max(chance, 1e-9)) for chance in given]
        log_probs = [sum(logs[: depth + 1]) for depth in range(count)]
        return TokenTree(tuple(token_ids), tuple(range(-1, count - 1)), tuple(log_probs))


class StatedMtp(MtpDrafter):
    """The block's own cost, and a stated acceptance."""

    acceptance = Acceptance(ACCEPTED["mtp"])

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """See `Drafter`."""
        super().propose(context, budget)
        return self.acceptance.draft(context, min(budget, self._max_steps))


class StatedDflash(DflashDrafter):
    """The drafter's own cost, and a stated acceptance."""

    acceptance = Acceptance(ACCEPTED["dflash"])

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """See `Drafter`."""
        own = super().propose(context, budget)
        assert len(own), "the drafter runs"
        return self.acceptance.draft(context, min(budget, self._num_rows - 1))
