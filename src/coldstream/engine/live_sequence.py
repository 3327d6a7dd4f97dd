"""The one sequence whose state the model holds, and when a prompt may continue it.

A recurrent state can't be rolled back, so a prompt reuses it only by extending it: all live tokens must be a
prefix of the prompt, with at least one token left to compute. Any other prompt starts from an empty state.

A NaN in a state shows only in its logits, which on a GPU may not be computed yet. So a later prompt extends a
state only if a token was chosen from its last logits, which fails unless all of them are finite.
"""

from collections.abc import Sequence

from coldstream import kvcache
from coldstream.decoding import AnyLogits, Progress
from coldstream.models.runner import ModelRunner


class LiveSequence:
    """A `TargetModel` over one sequence of a runner, which knows which tokens it holds.

    After an exception while computing, or without a call of `trust` after it, the state counts as unknown and
    the next prompt starts from an empty one.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sequence = runner.new_sequence()
        self._token_ids: list[int] | None = None  # None: unknown
        self._is_trusted = False
        self._num_reused = 0

    @property
    def expert_uses(self) -> tuple[int, int] | None:
        """See `ModelRunner`."""
        return self._runner.expert_uses

    @property
    def num_reused(self) -> int:
        """Tokens of the last prompt that were already in the state."""
        return self._num_reused

    def trust(self) -> None:
        """Declares the last logits, and so the state, to be finite: a prompt may extend it."""
        self._is_trusted = True

    def forget(self) -> None:
        """Free the sequence's memory; the next prompt starts from an empty state."""
        self._token_ids = None
        self._runner.clear(self._sequence)

    def hand_over(self) -> tuple[list[int], kvcache.Sequence]:
        """Passes the live tokens, none if no prompt may extend them, and their sequence to the caller.

        The live sequence is a new, empty one until `hold`.
        """
        live, sequence = self._extendable(), self._sequence
        self._sequence = self._runner.new_sequence()
        return live, sequence

    def hold(self, token_ids: list[int], sequence: kvcache.Sequence) -> None:
        """Make `sequence`, which has `token_ids` and from whose logits a token was chosen, the live one."""
        self._runner.release(self._sequence)
        self._sequence = sequence
        self._token_ids = token_ids
        self._is_trusted = True

    def prefill(self, token_ids: Sequence[int], progress: Progress | None) -> AnyLogits:
        """Make `token_ids` the sequence, computing what the state lacks; logits [vocab] after the last."""
        live = self._extendable()
        self._num_reused = num_live_prefix(live, token_ids)
        if self._num_reused == 0:
            self._runner.clear(self._sequence)
        return self._extended(list(token_ids[: self._num_reused]), token_ids[self._num_reused :], progress)

    def decode(self, token_id: int) -> AnyLogits:
        """Append `token_id`; logits [vocab] after it. Must follow `prefill`."""
        live = self._taken()
        assert live is not None, "decode needs a known sequence"
        return self._extended(live, (token_id,), None)

    def _extendable(self) -> list[int]:
        live = self._taken() or []
        # The runner itself empties a sequence whose computation failed.
        return live if self._is_trusted and self._sequence.length == len(live) else []

    def _taken(self) -> list[int] | None:
        """The live tokens, which are unknown until `_extended` has succeeded."""
        live, self._token_ids = self._token_ids, None
        return live

    def _extended(self, live: list[int], new_ids: Sequence[int], progress: Progress | None) -> AnyLogits:
        self._is_trusted = False
        logits: AnyLogits = self._runner.extend(self._sequence, new_ids, progress)
        live += new_ids
        self._token_ids = live
        return logits


def num_live_prefix(live_ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """How many tokens of the prompt the state already holds: all live ones or none."""
    num_live = len(live_ids)
    return num_live if num_live < len(prompt_ids) and list(prompt_ids[:num_live]) == list(live_ids) else 0
