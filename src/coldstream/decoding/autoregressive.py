"""The plain loop: one token at a time, each chosen from the logits that the one before it produced.

It is the oracle for every faster loop, so it stays this short. It knows token ids only.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from coldstream.decoding.sampling_params import AnyLogits
from coldstream.errors import GenerationFault

Progress = Callable[[int, int], None]  # called with (tokens done, tokens in all)


class TargetModel(Protocol):
    """A model together with the state of the one sequence it is working on."""

    def prefill(self, token_ids: Sequence[int], progress: Progress | None) -> AnyLogits:
        """Make `token_ids` (at least one) the whole sequence; logits [vocab] after the last."""

    def decode(self, token_id: int) -> AnyLogits:
        """Append `token_id` to the sequence; logits [vocab] after it, valid until the next call."""


def generate_tokens(
    model: TargetModel,
    prompt_ids: Sequence[int],
    choose: Callable[[AnyLogits, Sequence[int]], int],
    *,
    end_ids: Collection[int],
    max_tokens: int,
    progress: Progress | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue `prompt_ids`, an end token included, at most `max_tokens` (≥ 1) of them.

    `choose(logits, context)` picks the next id, `context` being all ids so far. When this iterator ends or is
    closed, the model holds the prompt and every yielded token but the last. Raises GenerationFault if a
    chosen id is not one of the vocabulary's, and whatever `model` and `choose` raise.
    """
    context = list(prompt_ids)
    logits = model.prefill(context, progress)
    while True:
        token_id = choose(logits, context)
        if not 0 <= token_id < len(logits):
            raise GenerationFault(f"token {token_id} was chosen from a vocabulary of {len(logits)}")
        yield token_id
        context.append(token_id)
        if token_id in end_ids or len(context) == len(prompt_ids) + max_tokens:
            return
        logits = model.decode(token_id)
