"""Drafters whose device drafts, verifies and accepts by itself, in fused steps (`engine/fused_steps.py`)."""

from collections.abc import Sequence as Listed
from typing import Any, Protocol

from coldstream.decoding.drafters.drafter import Drafter
from coldstream.kernels.rounds.reference import Accepted, RoundText
from coldstream.kvcache import Sequence


class DeviceRounds(Protocol):
    """See `models.cuda.fused_draft.FusedRun`."""

    def launch(self, num_nodes: int) -> None:
        """Queue a round with a draft of so many tokens."""

    def take(self) -> Accepted:
        """Wait for the oldest round."""

    def end(self) -> tuple[int, Any | None]:
        """Wait for all; how many rows the model's sequence and the block have more than before, and the
        model's state of the last one, unless it is gone.
        """


class RoundDrafter(Drafter, Protocol):
    """A drafter that may have such a device."""

    @property
    def runs_rounds(self) -> bool:
        """Whether it has."""

    def begin_rounds(self, context: Listed[int], sequence: Sequence, text: RoundText) -> DeviceRounds | None:
        """Rounds after `context`, of which `sequence` of the model holds all but the last token, the root.

        None where there are none for this text; otherwise `end_rounds` has to follow. Raises DeviceError if
        they cannot be begun, with `sequence` empty.
        """

    def end_rounds(self, num_rows: int, state: Any) -> None:
        """Rounds have ended after so many rows; state: as `DeviceRounds.end` has it."""
