"""One request's choices: which tokens it may take now, and what it wants to know about them."""

from collections.abc import Collection, Sequence

import numpy as np

from coldstream.decoding.logprobs import RankedLogprob, token_logprobs
from coldstream.decoding.sampling import choose_token
from coldstream.decoding.sampling_params import AnyLogits, SamplingParams


class TokenChooser:
    """Chooses the tokens after a prompt of `num_prompt_tokens`, none of `end_ids` before `min_tokens`.

    `logprobs` belong to the last choice; None if they are not wanted.
    """

    def __init__(
        self, params: SamplingParams, seed: int, num_prompt_tokens: int, end_ids: Collection[int]
    ) -> None:
        self._params = params
        self._seed = seed
        self._first_end = num_prompt_tokens + params.min_tokens  # position of the first token that may be one
        self._end_ids = end_ids
        self.logprobs: list[RankedLogprob] | None = None

    def __call__(self, logits: AnyLogits, context: Sequence[int]) -> int:
        """The token that follows `context`, all ids so far. Raises as `sample_token`."""
        forbidden_ids = self._end_ids if len(context) < self._first_end else ()
        count = self._params.logprobs
        if count is None:
            return choose_token(logits, context, self._params, self._seed, forbidden_ids)
        values = np.asarray(logits)
        token_id = choose_token(values, context, self._params, self._seed, forbidden_ids)
        self.logprobs = token_logprobs(values, token_id, count)
        return token_id
