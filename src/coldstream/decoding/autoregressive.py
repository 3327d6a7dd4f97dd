"""The plain loop: one token at a time, each chosen from the logits that the one before it produced.

It is the oracle for every faster loop, so it stays this short. It knows token ids only.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from coldstream.decoding.device_logits import AnyLogits
from coldstream.errors import GenerationFault


class Continuation:
    """The ids of a prompt and of the tokens chosen after it, and whether generation goes on.

    It ends with a token of `end_ids`, or with `max_tokens` (≥ 1) of them.
    """

    def __init__(self, prompt_ids: Sequence[int], *, end_ids: Collection[int], max_tokens: int) -> None:
        self.ids = list(prompt_ids)
        self.has_ended = False
        self._end_ids = end_ids
        self._most = len(self.ids) + max_tokens

    @property
    def num_left(self) -> int:
        """The most tokens that may still be appended."""
        return self._most - len(self.ids)

    def append(self, token_id: int, vocab_size: int) -> None:
        """Append the token that was chosen after all ids so far.

        Raises GenerationFault if its id is not one of the vocabulary's.
        """
        if not 0 <= token_id < vocab_size:
            raise GenerationFault(f"token {token_id} was chosen from a vocabulary of {vocab_size}")
        self.ids.append(token_id)
        self.has_ended = token_id in self._end_ids or self.num_left == 0


def generate_tokens(
    append: Callable[[Sequence[int]], AnyLogits],
    logits: AnyLogits,
    prompt_ids: Sequence[int],
    choose: Callable[[AnyLogits, Sequence[int]], int],
    *,
    end_ids: Collection[int],
    max_tokens: int,
) -> Iterator[int]:
    """Yield the tokens of a `Continuation` of `prompt_ids` one by one.

    The model holds the prompt, and `logits` [vocab] follow it. `append(token_ids)` has the model compute
    tokens after those that it holds, and returns the logits after them, valid until the next call.
    `choose(logits, context)` picks the next id, `context` being all ids so far.

    When this iterator ends or is closed, the model holds the prompt and every yielded token but the last.
    Raises whatever `Continuation.append`, `append` and `choose` raise.
    """
    tokens = Continuation(prompt_ids, end_ids=end_ids, max_tokens=max_tokens)
    while True:
        token_id = choose(logits, tokens.ids)
        tokens.append(token_id, len(logits))
        yield token_id
        if tokens.has_ended:
            return
        logits = append((token_id,))
