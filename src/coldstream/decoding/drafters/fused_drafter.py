"""Drafters whose device drafts, verifies and accepts by itself, in fused steps (`engine/fused_steps.py`)."""

from collections.abc import Sequence as Listed
from typing import Any, Protocol

from coldstream.decoding.drafters.drafter import Drafter
from coldstream.kernels.fused.reference import FusedResult, FusedText
from coldstream.kvcache import Sequence


class FusedRun(Protocol):
    """See `models.cuda.fused_draft.CudaFusedRun`."""

    def launch(self, num_nodes: int) -> None:
        """Queues a fused step with a draft of `num_nodes` tokens."""

    def take(self) -> FusedResult:
        """Waits for the oldest fused step."""

    def end(self) -> tuple[int, Any | None]:
        """Waits for all; how many rows the model's sequence and the block have more than before, and the
        model's state of the last one, unless it is gone.
        """


class FusedDrafter(Drafter, Protocol):
    """A drafter whose device may run fused steps."""

    @property
    def has_fused_steps(self) -> bool:
        """Whether it does."""

    def begin_fused(self, context: Listed[int], sequence: Sequence, text: FusedText) -> FusedRun | None:
        """Begins fused steps after `context`. `sequence` holds its tokens but the last one, the root.

        None where the device has none for this text; otherwise `end_fused` has to follow. Raises DeviceError
        if they cannot be begun, with `sequence` empty.
        """

    def end_fused(self, num_rows: int, state: Any) -> None:
        """The fused steps have ended after `num_rows` rows; state: as `FusedRun.end` has it."""
