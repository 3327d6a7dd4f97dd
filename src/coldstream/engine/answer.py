"""One answer: chosen tokens become pieces of text, until one of the reasons to stop.

Knows tokens, text and clocks; not where the prompt comes from, nor where the model computes.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from coldstream.decoding import (
    RepetitionWatch,
    SampledToken,
    SamplingParams,
    SpeculationStatistics,
    StopMatcher,
    TokenChooser,
    derived_seed,
)
from coldstream.engine.constraint import AnswerConstraint
from coldstream.engine.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Piece,
    Statistics,
    TokenLogprobs,
)
from coldstream.gguf.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Request:
    """A prompt, ready to compute one answer. `end_ids` is empty if end tokens are to be ignored."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    tier: str
    threads: int

    @property
    def all_end_ids(self) -> frozenset[int]:
        """Tokens that end the answer."""
        return self.end_ids | self.stop_token_ids

    def answers(self) -> list[Self]:
        """The `params.n` answers to the prompt, each a request with a seed of its own."""
        return [replace(self, seed=derived_seed(self.seed, index)) for index in range(self.params.n)]


class AnswerState:
    """The state of one answer: choice of tokens, pieces, text, counts and times since its creation."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        expert_uses: tuple[int, int] | None,
        constraint: AnswerConstraint | None = None,
    ) -> None:
        """expert_uses: of the model so far, see `ModelRunner`; constraint: that of the request, by
        `Grammars.constraint`.
        """
        self._request = request
        self._tokenizer = tokenizer
        self._uses_before = expert_uses
        self._clock = _Clock()
        self._text = _AnswerText(request, tokenizer)
        self._stop_piece = _no_token(request)
        self._repetition = (
            None if request.params.repetition is None else RepetitionWatch(request.params.repetition)
        )
        self._is_repeating = False
        self.has_stopped = False  # by an end token or a stop string, or because the answer repeats itself
        self._constraint = constraint
        self._ids: list[int] = []
        self._is_dead_end = False  # whether the grammar ended the answer where it does not match
        self.chooser = TokenChooser(
            request.params, request.seed, len(request.prompt_token_ids), request.all_end_ids, constraint
        )

    def push(self, chosen: SampledToken) -> Piece:
        """Appends a token. Its piece is to be shown, unless the answer has stopped: then `last_piece` has
        its text.
        """
        self._clock.count_token()
        token_id = chosen.token_id
        piece = Piece(self._text.push(token_id), (token_id,), _logprobs(chosen, self._tokenizer))
        self._is_repeating = self._repetition is not None and self._repetition.push(token_id)
        self.has_stopped = self._text.has_ended or self._is_repeating
        if self.has_stopped:
            self._stop_piece = piece
            self._is_dead_end = self._constraint is not None and self._constraint.is_dead_end(self._ids)
        self._ids.append(token_id)
        return piece

    def last_piece(
        self,
        reason: FinishReason,
        num_reused: int,
        expert_uses: tuple[int, int] | None,
        speculation: SpeculationStatistics | None = None,
    ) -> Piece:
        """The last piece of an answer, which ends for `reason` unless it has stopped by itself."""
        return replace(
            self._stop_piece,
            text=self._stop_piece.text + self._text.finish(),
            finish_reason=self._finish_reason(reason),
            stop_reason=self._text.stop_reason,
            statistics=self._clock.statistics(
                self._request, num_reused, _hit_rate(self._uses_before, expert_uses), speculation
            ),
        )

    def _finish_reason(self, reason: FinishReason) -> FinishReason:
        if self._is_dead_end:
            return "grammar"
        return "stop" if self._text.has_ended else "repetition" if self._is_repeating else reason


def cancelled_piece(request: Request) -> Piece:
    """The only piece of a request that was cancelled before it had the model."""
    statistics = _Clock().statistics(request, 0, None)
    return replace(_no_token(request), finish_reason="cancelled", statistics=statistics)


def completion(index: int, pieces: Sequence[Piece]) -> CompletionOutput:
    """The answer that came in `pieces`."""
    reason, statistics = pieces[-1].ending()
    token_ids = tuple(itertools.chain.from_iterable(piece.token_ids for piece in pieces))
    logprobs = cumulative = None
    if pieces[-1].logprobs is not None:
        logprobs = tuple(itertools.chain.from_iterable(piece.logprobs or () for piece in pieces))
        chosen = zip(logprobs, token_ids, strict=True)
        cumulative = math.fsum(by_id[token_id].logprob for by_id, token_id in chosen)
    return CompletionOutput(
        index,
        "".join(piece.text for piece in pieces),
        token_ids,
        reason,
        pieces[-1].stop_reason,
        logprobs,
        cumulative,
        statistics,
    )


class _AnswerText:
    """The text of one answer, and whether a stop string or end token has ended it."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._include_stop = request.params.include_stop_str_in_output
        params = request.params
        self._decoder = StreamDecoder(
            tokenizer, params.skip_special_tokens, is_marking=params.marks_control_tokens
        )
        self._matcher = StopMatcher(request.params.stop or (), include=self._include_stop)
        self._num_tokens = 0
        self.has_ended = False
        self.stop_reason: int | str | None = None

    def push(self, token_id: int) -> str:
        """Appends `token_id`; the text that may be shown since."""
        self._num_tokens += 1
        is_end = token_id in self._request.end_ids
        if is_end or token_id in self._request.stop_token_ids:
            self.has_ended = True
            is_asked_for = not is_end
            self.stop_reason = token_id if is_asked_for else None
            own = self._decoder.push(token_id) if is_asked_for and self._include_stop else ""
            return self._matcher.feed(own + self._decoder.finish())
        may_end = self._num_tokens > self._request.params.min_tokens
        text = self._matcher.feed(self._decoder.push(token_id), may_end=may_end)
        self.stop_reason = self._matcher.matched
        self.has_ended = self.stop_reason is not None
        return text

    def finish(self) -> str:
        """The text that was still held back."""
        return self._matcher.feed(self._decoder.finish()) + self._matcher.flush()


class _Clock:
    """Times and counts of one request, from its creation on."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first = self._last = self._start
        self._num_tokens = 0

    def count_token(self) -> None:
        self._last = time.perf_counter()
        self._num_tokens += 1
        if self._num_tokens == 1:
            self._first = self._last

    def statistics(
        self,
        request: Request,
        num_reused: int,
        hit_rate: float | None,
        speculation: SpeculationStatistics | None = None,
    ) -> Statistics:
        return Statistics(
            prompt_tokens=len(request.prompt_token_ids),
            reused_tokens=num_reused,
            generated_tokens=self._num_tokens,
            time_to_first_token_s=self._first - self._start,
            generation_s=self._last - self._first,
            tier=request.tier,
            threads=request.threads,
            seed=request.seed,
            expert_hit_rate=hit_rate,
            speculation=speculation,
        )


def _hit_rate(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Hit rate between two counts of (hits, misses); None without uses."""
    if before is None or after is None or after == before:
        return None
    hits, misses = after[0] - before[0], after[1] - before[1]
    return hits / (hits + misses)


def _no_token(request: Request) -> Piece:
    return Piece("", logprobs=None if request.params.logprobs is None else ())


def _logprobs(chosen: SampledToken, tokenizer: Tokenizer) -> tuple[TokenLogprobs] | None:
    """The log-probabilities of a piece with one token."""
    if chosen.logprobs is None:
        return None
    return (
        {
            token_id: Logprob(logprob, rank, tokenizer.decode((token_id,), skip_special=False))
            for token_id, logprob, rank in chosen.logprobs
        },
    )
