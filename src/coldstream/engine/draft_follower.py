"""A drafter that follows one sequence after another, and knows which tokens of it the drafter observed."""

from collections.abc import Collection, Sequence
from typing import Any

from coldstream.decoding import Drafter, TokenTree
from coldstream.engine.drafting import states_for
from coldstream.models.runner import ModelRunner


class DraftFollower:
    """A drafter that nobody else uses."""

    def __init__(self, runner: ModelRunner, drafter: Drafter) -> None:
        self.drafter = drafter
        self._states = states_for(runner, drafter)
        self._known: list[int] = []
        self._owner: object = None  # the owner of the followed sequence

    def follow(self, owner: object, token_ids: Sequence[int], length: int) -> None:
        """Goes on behind the first `length` of the tokens of `owner`, which are computed."""
        if len(self._known) == length and self._owner is owner:
            return
        common = self.num_common(token_ids[:length])
        self.drafter.truncate(common)
        if common < length and self._states is None:
            self.drafter.extend(token_ids[common:length], None)
        elif common < length:
            self.drafter.truncate(length)
        self._known, self._owner = list(token_ids[:length]), owner

    def states_of(self, rows: Collection[int]) -> Any:
        """What `extend` takes of these rows of the last step, beside their tokens."""
        return None if self._states is None else self._states(rows)

    def extend(self, token_ids: Sequence[int], states: Any) -> None:
        """The model has computed these tokens after those before."""
        self.drafter.extend(token_ids, states)
        self._known += token_ids

    def computed(self, token_ids: Sequence[int]) -> None:
        """The drafter has computed these tokens itself, as has the model."""
        self._known += token_ids

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """See `Drafter`."""
        return self.drafter.propose(context, budget)

    def forget(self) -> None:
        """Gives memory back; nothing is known."""
        self.drafter.truncate(0)
        self._known, self._owner = [], None

    def num_common(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are those that the drafter observed."""
        pairs = zip(self._known, token_ids, strict=False)
        shorter = min(len(self._known), len(token_ids))
        return next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
