"""What every drafter does, and those whose device runs fused steps (`engine/fused_steps.py`)."""

from collections.abc import Sequence as Listed
from typing import Any, Protocol

from coldstream.decoding.token_tree import TokenTree
from coldstream.kernels.fused.reference import FusedResult, FusedText
from coldstream.kvcache import Sequence


class Drafter(Protocol):
    """Proposes what may follow one sequence, whose computed tokens it observes.

    A drafter may be wrong in any way: tokens do not depend on what it proposes. Its methods do not raise.
    """

    @property
    def name(self) -> str:
        """As statistics call it."""

    @property
    def wants_hidden(self) -> bool:
        """Whether `extend` needs hidden states."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the model, ascending, after which `extend` needs the residual stream.

        Such a drafter wants no hidden states. Empty for one that needs no residual streams.
        """

    def truncate(self, length: int) -> None:
        """The sequence now has `length` computed tokens: the first ones that the drafter observed.

        If there are more, the drafter does not observe the others.
        """

    def extend(self, token_ids: Listed[int], hidden: Any) -> None:
        """The model has computed these tokens after those before.

        hidden: float32 [len(token_ids), E], the states after them that the model's head reads; for a drafter
        with auxiliary layers, [len(token_ids), len(aux_layers) · E], its features: the residual streams after
        these layers, side by side. On the model's device and valid during this call. None if the drafter
        wants neither.
        """

    def propose(self, context: Listed[int], budget: int) -> TokenTree:
        """At most `budget` nodes (≥ 1) after `context`: the computed tokens, then the root."""


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
