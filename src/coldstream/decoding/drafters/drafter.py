"""What every drafter does."""

from collections.abc import Sequence
from typing import Any, Protocol

from coldstream.decoding.token_tree import TokenTree


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

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        """The model has computed these tokens after those before.

        hidden: float32 [len(token_ids), E], the states after them that the model's head reads; for a drafter
        with auxiliary layers, [len(token_ids), len(aux_layers) · E], its features: the residual streams after
        these layers, side by side. On the model's device and valid during this call. None if the drafter
        wants neither.
        """

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """At most `budget` nodes (≥ 1) after `context`: the computed tokens, then the root."""
