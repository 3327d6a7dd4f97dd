"""The loop of `autoregressive.py` for a device that chooses tokens itself: the step of a token is launched
before the host has seen it, so that the device does not wait for the host between two tokens.

A token after which generation ends is known to the device too, which then leaves the step's row out: the
sequence stays what the plain loop leaves.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol

from coldstream.decoding.autoregressive import Continuation
from coldstream.decoding.choice import StartedChoices, only_token
from coldstream.decoding.device_logits import AnyLogits
from coldstream.kvcache import ChosenToken


class AheadModel(Protocol):
    """A model, with one sequence, that takes tokens which only its device knows."""

    def append_chosen(self, token: ChosenToken) -> AnyLogits:
        """Compute a token that the device is choosing; logits [vocab] after it, until the next call."""

    def settle(self, token_id: int | None) -> None:
        """Say which token `append_chosen` had; None if it was an end token, so that its row was left out."""


BeginToken = Callable[[AnyLogits, Sequence[int], int | None], StartedChoices]
"""Begins to choose the token after a context, all ids that are known, and, if not None, the device's result
with this number; from the logits [vocab] after them.
"""


class TokenAhead(NamedTuple):
    """A token, and whether the step that it comes from was under way together with those before and after it,
    as all are of a long run but its first and its last.
    """

    token_id: int
    is_between: bool


def generate_tokens_ahead(
    model: AheadModel,
    logits: AnyLogits,
    prompt_ids: Sequence[int],
    begin: BeginToken,
    *,
    end_ids: frozenset[int],
    max_tokens: int,
) -> Iterator[int]:
    """Yield the tokens that `generate_tokens` yields.

    The model holds the prompt, and `logits` [vocab] follow it.

    When this iterator ends, the model holds the prompt and every yielded token but the last; if it is closed
    before, or fails, perhaps the last as well. Raises as `generate_tokens`.
    """
    tokens = Continuation(prompt_ids, end_ids=end_ids, max_tokens=max_tokens)
    for token_id, _ in continue_ahead(model, logits, tokens, begin, end_ids, lambda: True):
        yield token_id


def continue_ahead(
    model: AheadModel,
    logits: AnyLogits,
    tokens: Continuation,
    begin: BeginToken,
    end_ids: frozenset[int],
    may_launch: Callable[[], bool],
) -> Generator[TokenAhead]:
    """Yield the tokens that follow, appended to `tokens`, until generation ends or `may_launch` says no.

    may_launch: asked, before a token is known, whether the step of this token is launched.

    The model holds all tokens, and `logits` [vocab] follow them; for the end see `generate_tokens_ahead`.
    """
    started, was_launched = begin(logits, tokens.ids, None), False
    while True:
        following = None
        if tokens.num_left > 1 and may_launch():
            unseen = started.index(0)
            logits = model.append_chosen(ChosenToken(unseen, end_ids))
            following = begin(logits, tokens.ids, unseen)
        token_id = only_token(started).token_id
        tokens.append(token_id, len(logits))
        if following is not None:
            model.settle(None if tokens.has_ended else token_id)
        yield TokenAhead(token_id, was_launched and following is not None)
        if tokens.has_ended or following is None:
            return
        started, was_launched = following, True
