"""Chooses the tokens after the rows of a step, of one request or of many with different settings.

The tokens of a step are chosen together, in one call of the device. Each is the same as if chosen alone.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from coldstream.decoding.device_logits import AnyLogits, DeviceChoice, DeviceStep
from coldstream.decoding.logprobs import RankedLogprob, logprobs_of, ranked_by_ids
from coldstream.decoding.sampling import changed_logits, no_token_left, recent_tokens
from coldstream.decoding.sampling_params import Logits, SamplingParams
from coldstream.errors import DeviceError, GenerationFault, InvalidRequestError
from coldstream.kernels import _csrc
from coldstream.kernels.fused.reference import FusedText
from coldstream.kernels.sample.settings import BLOCKS_MISSED, MAX_BIASED, Bitmask, RowSettings
from coldstream.models.spec.sanity import damaged_logits

_NO_LOGITS: Final = np.empty(0, np.float32)  # where only settings are wanted


class Constraint(Protocol):
    """What a request demands of its answer, as it says which tokens may follow."""

    def allowed(self, context: Sequence[int]) -> Bitmask | None:
        """The tokens that may follow `context`, all ids so far, prompt included; None: all.

        Raises InvalidRequestError where the context is beyond its limits.
        """


@dataclass
class TokenChoice:
    """A row of logits, and everything else that determines the token after it.

    Neither this nor `SampledToken` and `StartedChoices` are frozen: making one is part of every token's time.
    """

    logits: AnyLogits
    context: Sequence[int]  # all ids so far; at a node of a draft tree, those on the path to it
    params: SamplingParams
    seed: int
    forbidden_ids: Collection[int] = ()
    unseen: int | None = None  # the device's result that follows `context`, which the host does not know yet
    constraint: Constraint | None = None  # it has to know all of the context

    @property
    def position(self) -> int:
        """The position of the token in its sequence."""
        return len(self.context) + (self.unseen is not None)

    @property
    def needs_host(self) -> bool:
        """Whether the choice needs all logits on the host."""
        return _wants_logits(self.params, self.forbidden_ids)

    @property
    def is_on_device(self) -> bool:
        """Whether a device makes the choice."""
        return not (isinstance(self.logits, np.ndarray) or self.needs_host)

    @property
    def biases(self) -> dict[int, float]:
        """What is added to logits before penalties, by token; −inf for forbidden ones."""
        if not (self.params.logit_bias or self.forbidden_ids):
            return {}
        return {**dict(self.params.logit_bias or ()), **dict.fromkeys(self.forbidden_ids, -math.inf)}

    @property
    def settings(self) -> RowSettings:
        """The settings for a device, or for C++. Raises as the constraint."""
        params = self.params
        assert self.unseen is None or self.constraint is None, "what may follow depends on an unseen token"
        context = self.context
        if self.unseen is not None and params.has_penalties:
            context = [*context, -1 - self.unseen]
        biases = self.biases
        return RowSettings(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            recent=recent_tokens(context, params),
            seed=self.seed,
            position=self.position,
            biased=tuple(biases),
            biases=tuple(biases.values()),
            allowed=None if self.constraint is None else self.constraint.allowed(context),
            logprobs=params.logprobs,
        )


@dataclass
class SampledToken:
    """A token, and the log-probabilities that its request asked for."""

    token_id: int
    logprobs: list[RankedLogprob] | None = None


Outcome = SampledToken | GenerationFault | InvalidRequestError | DeviceError


@dataclass
class StartedChoices:
    """Choices of which those on a device are under way."""

    on_device: tuple[int, ...]  # numbers of the choices that a device makes
    positions: tuple[int, ...]  # positions of their tokens
    ranked: frozenset[int]  # numbers of those of them whose log-probabilities are wanted
    vocab_size: int
    device: DeviceChoice | None
    on_host: dict[int, Outcome]

    @property
    def is_on_device(self) -> bool:
        """Whether a device makes all choices, each of which has an `index`."""
        return self.device is not None and self.device.has_indices and not self.on_host

    def index(self, choice: int) -> int:
        """The device's result for one of the choices, which must be on it; see `ChosenToken`."""
        assert self.device is not None, "the device chooses none of these tokens"
        return self.device.index(self.on_device.index(choice))

    def outcomes(self) -> list[Outcome]:
        """The results of all choices. Waits for the device, and raises its errors."""
        outcomes = dict(self.on_host)
        results = [] if self.device is None else self.device.results()
        for i, position, (token_id, fault) in zip(self.on_device, self.positions, results, strict=True):
            if fault != 0:
                outcomes[i] = no_token(fault, self.vocab_size, position)
            elif i in self.ranked:
                assert self.device is not None, "it has given results"
                ranked = self.device.ranked(self.on_device.index(i))
                outcomes[i] = SampledToken(token_id, logprobs_of(token_id, ranked))
            else:
                outcomes[i] = SampledToken(token_id)
        return [outcomes[i] for i in range(len(outcomes))]


def begin_choices(choices: Sequence[TokenChoice]) -> StartedChoices:
    """Begins the choices that a device can make, and makes the others: for each row the result of
    `sample_token`, or the error that it raises.

    Rows on a device must be different rows of one step; they are copied only if the host needs them. Raises
    the device's errors.
    """
    on_device: list[int] = []
    near: list[int] = []
    on_host: dict[int, Outcome] = {}
    settings: dict[int, RowSettings] = {}
    for i, choice in enumerate(choices):
        try:
            settings[i] = choice.settings
        except InvalidRequestError as error:  # of a constraint
            on_host[i] = error
        else:
            (on_device if choice.is_on_device else near).append(i)
    device = None
    if on_device:
        far = [choices[i].logits for i in on_device]
        rows = [each.row for each in far if not isinstance(each, np.ndarray)]
        assert len(set(rows)) == len(rows), "penalties of two choices would meet in one row"
        device = _step_of(far).begin(rows, [settings[i] for i in on_device])
    if near:
        brought = _brought([choices[i].logits for i in near])
        made = _chosen_here([choices[i] for i in near], [settings[i] for i in near], brought)
        on_host |= zip(near, made, strict=True)
    positions = tuple([choices[i].position for i in on_device])
    ranked = frozenset([i for i in on_device if settings[i].logprobs is not None])
    vocab_size = len(choices[0].logits) if choices else 0
    return StartedChoices(tuple(on_device), positions, ranked, vocab_size, device, on_host)


def _wants_logits(params: SamplingParams, forbidden_ids: Collection[int]) -> bool:
    """Whether all logits are looked at on the host, whatever token is chosen."""
    num_biased = len(params.logit_bias or ()) + len(forbidden_ids)
    return bool(params.logits_processors) or num_biased > MAX_BIASED


def _brought(rows: Sequence[AnyLogits]) -> list[Logits]:
    """The logits on the host, those of a device in one copy."""
    near = [each for each in rows if isinstance(each, np.ndarray)]
    if len(near) == len(rows):
        return near
    far = [each for each in rows if not isinstance(each, np.ndarray)]
    brought = iter(_step_of(far).bring([each.row for each in far]))
    return [each if isinstance(each, np.ndarray) else next(brought) for each in rows]


def _step_of(rows: Sequence[AnyLogits]) -> DeviceStep:
    steps = [each.step for each in rows if not isinstance(each, np.ndarray)]
    assert all(each is steps[0] for each in steps), "rows are chosen by one step"
    return steps[0]


def _chosen_here(
    choices: Sequence[TokenChoice], settings: Sequence[RowSettings], rows: Sequence[Logits]
) -> list[Outcome]:
    """What `sample_token` and `token_logprobs` give for each of these choices, from its logits."""
    made = [_row_choice(*each) for each in zip(choices, settings, rows, strict=True)]
    _csrc.choose_tokens([each for each in made if isinstance(each, _csrc.TokenChoice)])
    return [
        _outcome(choice, logits, each) if isinstance(each, _csrc.TokenChoice) else each
        for choice, logits, each in zip(choices, rows, made, strict=True)
    ]


def _row_choice(
    choice: TokenChoice, settings: RowSettings, logits: Logits
) -> _csrc.TokenChoice | GenerationFault | InvalidRequestError:
    """A choice for C++, which does not know logits processors; or their error."""
    if not choice.params.logits_processors:
        return _csrc.TokenChoice(logits, None, **vars(settings))
    try:
        changed = changed_logits(logits, choice.context, choice.params, choice.forbidden_ids)
    except (GenerationFault, InvalidRequestError) as error:
        return error
    settings = replace(settings, recent=(), biased=(), biases=())
    return _csrc.TokenChoice(logits, np.ascontiguousarray(changed), **vars(settings))


def _outcome(choice: TokenChoice, logits: Logits, made: _csrc.TokenChoice) -> Outcome:
    if made.fault:
        return no_token(made.fault, len(logits), choice.position)
    if choice.params.logprobs is None:
        return SampledToken(made.token)
    ranked = ranked_by_ids(logits, made.token, *made.ranked)
    return SampledToken(made.token, logprobs_of(made.token, ranked))


def no_token(fault: int, vocab_size: int, position: int) -> GenerationFault | DeviceError:
    """The error for what a device or C++ says of a row without a token; see `DeviceChoice.results`."""
    if fault == BLOCKS_MISSED:
        return DeviceError(
            f"no token was chosen at position {position}: the GPU has not run all blocks of that launch at "
            "once within a second, as other programs hold it. Send the request again, or end these programs"
        )
    return no_token_left(position) if fault < 0 else damaged_logits(fault, vocab_size, position)


class TokenChooser:
    """Chooses the tokens after a prompt of `num_prompt_tokens`, none of `end_ids` before `min_tokens`."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        num_prompt_tokens: int,
        end_ids: Collection[int],
        constraint: Constraint | None = None,
    ) -> None:
        """constraint: what carries out the grammar and the thought's budget of `params`, if it has any."""
        assert params.is_constrained == (constraint is not None), "what a request demands is carried out"
        self._params = params
        self._constraint = constraint
        self._seed = seed
        self._first_end = num_prompt_tokens + params.min_tokens  # position where end tokens begin
        self._end_ids = end_ids

    @property
    def is_for_device(self) -> bool:
        """Whether a device makes all choices, if the logits are on one."""
        return not _wants_logits(self._params, self._end_ids if self._forbids else ())

    @property
    def needs_tokens(self) -> bool:
        """Whether the host has to know all tokens before one to begin its choice."""
        return self._constraint is not None

    @property
    def _forbids(self) -> bool:
        """Whether end tokens are forbidden at first."""
        return self._params.min_tokens > 0 and len(self._end_ids) > 0

    def fused_text(self, context: Sequence[int], num_left: int, most_nodes: int) -> FusedText | None:
        """What fused steps after `context` begin with; None unless a device makes all choices by itself.

        It must not need the host in between: a penalty depends on tokens that the host has not seen, and what
        is forbidden on how many there are. Fused steps have no room for biases, masks and ranks.
        """
        params = self._params
        if not self.is_for_device or params.has_penalties or params.logit_bias or self._forbids:
            return None
        if self.needs_tokens or params.logprobs is not None:
            return None
        settings = self.choice(_NO_LOGITS, context).settings
        return FusedText(most_nodes, context[-1], num_left, settings, frozenset(self._end_ids))

    def choice(self, logits: AnyLogits, context: Sequence[int], unseen: int | None = None) -> TokenChoice:
        """The `TokenChoice` of the token after `context`, all ids so far, from the logits [vocab] after it.

        unseen: see `TokenChoice`.
        """
        position = len(context) + (unseen is not None)
        forbidden_ids = self._end_ids if position < self._first_end else ()
        return TokenChoice(logits, context, self._params, self._seed, forbidden_ids, unseen, self._constraint)

    def __call__(self, logits: AnyLogits, context: Sequence[int]) -> SampledToken:
        """The token after this row, which is waited for. Raises its error."""
        return only_token(begin_choices([self.choice(logits, context)]))


def only_token(started: StartedChoices) -> SampledToken:
    """The token of the only choice. Raises its error."""
    (outcome,) = started.outcomes()
    return chosen_or_raised(outcome)


def chosen_or_raised(outcome: Outcome) -> SampledToken:
    """The token. Raises the error if there is one instead."""
    if not isinstance(outcome, SampledToken):
        raise outcome
    return outcome
