"""The one sequence whose state the model holds, and when a prompt may continue it.

A recurrent state can't be wound back, so a prompt reuses it only by extending it: all live tokens must be a
prefix of the prompt, with at least one token left to compute. Anything else starts afresh.

Whether a state is sound shows in its logits, and not before somebody has looked at them: a NaN in it makes
them NaN, and on a GPU they may not even be computed yet. So a later prompt extends a state only if a token
was chosen from its last logits, which fails unless all of them are finite.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from coldstream import kvcache
from coldstream.decoding import AnyLogits, Logits, Progress
from coldstream.kvcache import Batch, CacheSize


class Runner(Protocol):
    """What a model offers for computing one sequence; `models.runner.ModelRunner` does."""

    @property
    def position(self) -> int:
        """Tokens in the state."""

    @property
    def expert_uses(self) -> tuple[int, int] | None:
        """Uses of experts so far that found them in fast memory, and that did not; None: all are there."""

    def reset(self) -> None:
        """Forget the sequence."""

    def extend(self, token_ids: Sequence[int], progress: Progress | None = None) -> AnyLogits:
        """Append `token_ids` (at least one); logits [vocab] after the last, valid until the next call."""


@runtime_checkable
class BatchRunner(Runner, Protocol):
    """What a model offers for computing several sequences in a step; `models.cpu_runner.CpuRunner` does."""

    cache_size: CacheSize
    chunk_size: int  # rows of a step

    def step(self, batch: Batch) -> tuple[Logits, ...]:
        """Compute a batch; logits [wanted rows, vocab] of each segment."""

    def new_sequence(self) -> kvcache.Sequence:
        """An empty one."""

    def branch(self, sequence: kvcache.Sequence) -> kvcache.Sequence:
        """One with the same tokens."""

    def release(self, sequence: kvcache.Sequence) -> None:
        """Give its memory back."""

    def detach(self) -> kvcache.Sequence:
        """The sequence that `extend` appends to; the runner begins another."""

    def attach(self, sequence: kvcache.Sequence) -> None:
        """Make it the one that `extend` appends to."""


class LiveSequence:
    """A `TargetModel` over a `Runner` that knows which tokens the state holds.

    If computing is interrupted by any exception, or nobody says `trust` after it, the state counts as unknown
    and the next prompt starts afresh.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._token_ids: list[int] | None = None  # None: unknown
        self._is_trusted = False
        self._num_reused = 0

    @property
    def expert_uses(self) -> tuple[int, int] | None:
        """See `Runner`."""
        return self._runner.expert_uses

    @property
    def num_reused(self) -> int:
        """Tokens of the last prompt that were already in the state."""
        return self._num_reused

    def trust(self) -> None:
        """The last logits were sound, and so is the state behind them: a prompt may extend it."""
        self._is_trusted = True

    def forget(self) -> None:
        """Make the next prompt start afresh."""
        self._token_ids = None

    def hand_over(self) -> list[int]:
        """The live tokens, none if no prompt may extend them. They are unknown until `hold` or `prefill`."""
        live = self._taken() or []
        # A runner empties a state that it cannot vouch for itself.
        return live if self._is_trusted and self._runner.position == len(live) else []

    def hold(self, token_ids: list[int]) -> None:
        """The state has been made that of `token_ids`, and a token was chosen from its logits."""
        self._token_ids = token_ids
        self._is_trusted = True

    def prefill(self, token_ids: Sequence[int], progress: Progress | None) -> AnyLogits:
        """Make `token_ids` the sequence, computing what the state lacks; logits [vocab] after the last."""
        live = self.hand_over()
        self._num_reused = num_live_prefix(live, token_ids)
        if self._num_reused == 0:
            self._runner.reset()
        return self._extended(list(token_ids[: self._num_reused]), token_ids[self._num_reused :], progress)

    def decode(self, token_id: int) -> AnyLogits:
        """Append `token_id`; logits [vocab] after it. Must follow `prefill`."""
        live = self._taken()
        assert live is not None, "decode needs a known sequence"
        return self._extended(live, (token_id,), None)

    def _taken(self) -> list[int] | None:
        """The live tokens, which are unknown until `_extended` has succeeded."""
        live, self._token_ids = self._token_ids, None
        return live

    def _extended(self, live: list[int], new_ids: Sequence[int], progress: Progress | None) -> AnyLogits:
        self._is_trusted = False
        logits = self._runner.extend(new_ids, progress)
        live += new_ids
        self._token_ids = live
        return logits


def num_live_prefix(live_ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """How many tokens of the prompt the state already holds: all live ones or none."""
    num_live = len(live_ids)
    return num_live if num_live < len(prompt_ids) and list(prompt_ids[:num_live]) == list(live_ids) else 0
