"""Which tokens follow the rows of a step: those of one request, or of many with settings of their own.

All rows of a step are chosen together, so that a device is asked once. The token of a row is what it is
alone.
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
    """A row of logits, and all that decides the token after it."""

    logits: AnyLogits
    context: Sequence[int]  # all ids so far; at a node of a draft tree, those on the path to it
    params: SamplingParams
    seed: int
    forbidden_ids: Collection[int] = ()

    @property
    def needs_host(self) -> bool:
        """Whether something has to be known of all logits that a device does not say."""
        return bool(self.params.logits_processors or self.forbidden_ids or self.params.logprobs is not None)

    @property
    def settings(self) -> RowSettings:
        """What a device is told."""
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
    """A token, and the log-probabilities that its request wants to know."""

    token_id: int
    logprobs: list[RankedLogprob] | None = None


Outcome = Chosen | GenerationFault | InvalidRequestError


def choose_tokens(choices: Sequence[Choice]) -> list[Outcome]:
    """What `sample_token` chooses for each of several rows, or the error that it raises.

    Rows on a device are different ones of the same step; they stay there unless they are needed here. Raises
    what the device raises.
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
    # Those for which the device found no token come here too, for the message.
    left = [i for i in range(len(choices)) if i not in outcomes]
    for i, logits in zip(left, _brought([choices[i].logits for i in left]), strict=True):
        outcomes[i] = _chosen_here(choices[i], logits)
    return [outcomes[i] for i in range(len(choices))]


def _brought(rows: Sequence[AnyLogits]) -> list[Logits]:
    """The same logits, those of a device in one go."""
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
        self._first_end = num_prompt_tokens + params.min_tokens  # position of the first token that may be one
        self._end_ids = end_ids

    def choice(self, logits: AnyLogits, context: Sequence[int]) -> Choice:
        """That of the token after `context`, all ids so far, by the logits [vocab] after its last one."""
        forbidden_ids = self._end_ids if len(context) < self._first_end else ()
        return Choice(logits, context, self._params, self._seed, forbidden_ids)

    def __call__(self, logits: AnyLogits, context: Sequence[int]) -> Chosen:
        """`choose_tokens` for this row alone, raising its error."""
        (outcome,) = choose_tokens([self.choice(logits, context)])
        if not isinstance(outcome, Chosen):
            raise outcome
        return outcome
