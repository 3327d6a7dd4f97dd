"""Chooses the tokens after the rows of a step, of one request or of many with different settings.

The tokens of a step are chosen together, in one call of the device. Each is the same as if chosen alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from coldstream.decoding.device_logits import AnyLogits, DeviceLogits, DeviceStep
from coldstream.decoding.logprobs import RankedLogprob, token_logprobs
from coldstream.decoding.sampling import recent_tokens, sample_token
from coldstream.decoding.sampling_params import Logits, SamplingParams
from coldstream.errors import GenerationFault, InvalidRequestError
from coldstream.kernels.sample.settings import RowSettings


@dataclass(frozen=True)
class Choice:
    """A row of logits, and everything else that determines the token after it."""

    logits: AnyLogits
    context: Sequence[int]  # all ids so far; at a node of a draft tree, those on the path to it
    params: SamplingParams
    seed: int
    forbidden_ids: Collection[int] = ()

    @property
    def needs_host(self) -> bool:
        """Whether the choice needs all logits on the host."""
        return bool(self.params.logits_processors or self.forbidden_ids or self.params.logprobs is not None)

    @property
    def settings(self) -> RowSettings:
        """The settings for a device."""
        params = self.params
        return RowSettings(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            recent=recent_tokens(self.context, params),
            seed=self.seed,
            position=len(self.context),
        )


@dataclass(frozen=True)
class Chosen:
    """A token, and the log-probabilities that its request asked for."""

    token_id: int
    logprobs: list[RankedLogprob] | None = None


Outcome = Chosen | GenerationFault | InvalidRequestError


def choose_tokens(choices: Sequence[Choice]) -> list[Outcome]:
    """The result of `sample_token` for each of several rows, or the error that it raises.

    Rows on a device must be different rows of one step; they are copied only if the host needs them. Raises
    the device's errors.
    """
    outcomes: dict[int, Outcome] = {}
    far = {
        i: choice.logits
        for i, choice in enumerate(choices)
        if not isinstance(choice.logits, np.ndarray) and not choice.needs_host
    }
    if far:
        rows = [each.row for each in far.values()]
        assert len(set(rows)) == len(rows), "penalties of two choices would meet in one row"
        token_ids = _step_of(list(far.values())).choose(rows, [choices[i].settings for i in far])
        chosen = zip(far, token_ids, strict=True)
        outcomes = {i: Chosen(token_id) for i, token_id in chosen if token_id is not None}
    # Rows without a token on the device are computed here too, for the error's message.
    left = [i for i in range(len(choices)) if i not in outcomes]
    for i, logits in zip(left, _brought([choices[i].logits for i in left]), strict=True):
        outcomes[i] = _chosen_here(choices[i], logits)
    return [outcomes[i] for i in range(len(choices))]


def _brought(rows: Sequence[AnyLogits]) -> list[Logits]:
    """The logits on the host, those of a device in one copy."""
    far = [each for each in rows if not isinstance(each, np.ndarray)]
    brought = iter(_step_of(far).bring([each.row for each in far]) if far else ())
    return [each if isinstance(each, np.ndarray) else next(brought) for each in rows]


def _step_of(rows: Sequence[DeviceLogits]) -> DeviceStep:
    step = rows[0].step
    assert all(each.step is step for each in rows), "rows are chosen by one step"
    return step


def _chosen_here(choice: Choice, logits: Logits) -> Outcome:
    params = choice.params
    try:
        token_id = sample_token(logits, choice.context, params, choice.seed, choice.forbidden_ids)
    except (GenerationFault, InvalidRequestError) as error:
        return error
    count = params.logprobs
    return Chosen(token_id, None if count is None else token_logprobs(logits, token_id, count))


class TokenChooser:
    """Chooses the tokens after a prompt of `num_prompt_tokens`, none of `end_ids` before `min_tokens`."""

    def __init__(
        self, params: SamplingParams, seed: int, num_prompt_tokens: int, end_ids: Collection[int]
    ) -> None:
        self._params = params
        self._seed = seed
        self._first_end = num_prompt_tokens + params.min_tokens  # position where end tokens begin
        self._end_ids = end_ids

    def choice(self, logits: AnyLogits, context: Sequence[int]) -> Choice:
        """The `Choice` of the token after `context`, all ids so far, from the logits [vocab] after it."""
        forbidden_ids = self._end_ids if len(context) < self._first_end else ()
        return Choice(logits, context, self._params, self._seed, forbidden_ids)

    def __call__(self, logits: AnyLogits, context: Sequence[int]) -> Chosen:
        """`choose_tokens` for this row alone, raising its error."""
        (outcome,) = choose_tokens([self.choice(logits, context)])
        if not isinstance(outcome, Chosen):
            raise outcome
        return outcome
