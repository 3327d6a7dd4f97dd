"""The speculative loop for a device that drafts, verifies and accepts by itself: rounds are launched before
the host has seen what those before them gave.

A round drafts a chain and keeps what agrees with the tokens that are chosen after it
(`kernels/rounds/reference.py`). Each token is chosen from the logits after exactly the tokens before it, so
the tokens are those of the plain loop. The device knows where a text ends by a token or by its length; where
the host ends it otherwise, by a stop string or by closing, rounds in flight have kept tokens that it does not
want, and the model goes back.
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from coldstream.decoding.autoregressive import Continuation
from coldstream.decoding.choice import Chosen, no_token
from coldstream.kernels.rounds.reference import Accepted


class Rounds(Protocol):
    """Rounds after the last of some tokens, the root, which the model does not hold yet."""

    def launch(self, num_nodes: int) -> None:
        """Queue a round that drafts so many tokens; at most two may be in flight. One after the end of the
        text does nothing.
        """

    def take(self) -> Accepted:
        """Wait for the oldest round in flight, and return what came of it."""

    def end(self, num_kept: int) -> None:
        """Wait for all rounds. The model then holds what it held before them, and so many tokens from the
        root on.
        """


BeginRounds = Callable[[Sequence[int], int], Rounds | None]
"""Begins rounds after all tokens so far, of which the model holds all but the last, with so many that may
follow; None if there are none for this text.
"""


class RoundDrafts(Protocol):
    """Says how much each round drafts, and is told what came of it; see `speculative.Drafts`."""

    def begin_rounds(self) -> None: ...

    def rests(self) -> bool: ...

    def next_round(self) -> int: ...

    def round_ended(self, accepted: Accepted, seconds: float) -> None: ...


def generate_in_rounds(
    rounds: Rounds,
    tokens: Continuation,
    drafts: RoundDrafts,
    vocab_size: int,
    *,
    most_rounds: int | None = None,
) -> Generator[Chosen]:
    """Yield the tokens that follow `tokens`, which are appended to it, until generation ends, for so many
    rounds, or until `drafts` rest.

    The model holds all tokens but the last, now and when this iterator ends or is closed; if the token after
    a row cannot be chosen, not that row either. Raises as `generate_tokens`.
    """
    num_kept, num_launched, num_taken, start = 0, 1, 0, time.perf_counter()
    drafts.begin_rounds()
    try:
        rounds.launch(drafts.next_round())
        while not tokens.has_ended and num_taken < num_launched:
            if tokens.num_left > 1 and num_launched != most_rounds and not drafts.rests():
                rounds.launch(drafts.next_round())
                num_launched += 1
            accepted = rounds.take()
            num_taken += 1
            now = time.perf_counter()
            drafts.round_ended(accepted, now - start)
            start = now
            for token_id in accepted.token_ids:
                tokens.append(token_id, vocab_size)
                num_kept += 1
                yield Chosen(token_id)
            if accepted.fault:
                raise no_token(accepted.fault, vocab_size, len(tokens.ids))
    finally:
        rounds.end(num_kept)
