"""The tokens of one answer so far, and whether generation goes on. Knows token ids only."""

from collections.abc import Collection, Sequence

from coldstream.errors import GenerationFault


class Continuation:
    """The ids of a prompt and of the tokens chosen after it.

    Generation ends with a token of `end_ids`, or after `max_tokens` (≥ 1) tokens.
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
