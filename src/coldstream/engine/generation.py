"""One running request: tokens from the decoding loop become pieces of text, until one of the reasons to stop.

Knows tokens, text and clocks; not how the prompt came about, nor where the model computes.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from coldstream.decoding import Progress, SamplingParams, StopMatcher, choose_token, generate_tokens
from coldstream.engine.live_sequence import LiveSequence
from coldstream.engine.request import FinishReason, Piece, Statistics
from coldstream.gguf.tokenizer import StreamDecoder


@dataclass(frozen=True)
class Request:
    """A prompt, ready to compute. `end_ids` is empty if end tokens are to be ignored."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: frozenset[int]
    tier: str
    threads: int


class Stream(Iterator[Piece]):
    """The pieces of one answer. The last has the finish reason and the statistics.

    Nothing is computed before the first piece is asked for. `close` (also by `with`, or by dropping the
    stream) ends it at once; after `cancel`, which any thread or signal handler may call, the next piece is
    the last.
    """

    def __init__(self, start: Callable[[Callable[[], bool]], Generator[Piece, None, None]]) -> None:
        self._cancellation = _Cancellation()
        self._pieces = start(self._cancellation.is_requested)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def cancel(self) -> None:
        """Finish with reason `cancelled` at the next token, or the next chunk of a long prompt."""
        self._cancellation.request()

    def close(self) -> None:
        """Give the model free. The stream ends without a last piece."""
        self._pieces.close()


def generate_pieces(
    request: Request,
    model: LiveSequence,
    decoder: StreamDecoder,
    is_cancelled: Callable[[], bool],
    progress: Progress | None = None,
) -> Generator[Piece, None, None]:
    """Yield a piece per token and a last one with the statistics. Raises what computing raises."""
    matcher = StopMatcher(request.params.stop)
    clock = _Clock()
    uses_before = model.expert_uses
    reason: FinishReason = "length"
    last_ids: tuple[int, ...] = ()
    text = ""
    try:
        for token_id in _tokens(request, model, _watched(progress, is_cancelled)):
            clock.count_token()
            is_end = token_id in request.end_ids
            text = matcher.feed(decoder.finish() if is_end else decoder.push(token_id))
            if is_end or matcher.matched is not None:
                reason, last_ids = "stop", (token_id,)
                break
            yield Piece(text, (token_id,))
            text = ""
            if is_cancelled():
                reason = "cancelled"
                break
    except _CancelledError:
        reason = "cancelled"
    text += matcher.feed(decoder.finish()) + matcher.flush()
    statistics = clock.statistics(request, model.num_reused, _hit_rate(uses_before, model.expert_uses))
    yield Piece(text, last_ids, reason, statistics)


class _Cancellation:
    """A flag apart from the stream: pieces that referred to their own stream would outlive its last user."""

    def __init__(self) -> None:
        self._requested = False

    def request(self) -> None:
        self._requested = True

    def is_requested(self) -> bool:
        return self._requested


class _CancelledError(Exception):
    """Leaves the prefill of a cancelled request."""


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

    def statistics(self, request: Request, num_reused: int, hit_rate: float | None) -> Statistics:
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
        )


def _hit_rate(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Of the uses between two counts of hits and misses; None without any."""
    if before is None or after is None or after == before:
        return None
    hits, misses = after[0] - before[0], after[1] - before[1]
    return hits / (hits + misses)


def _tokens(request: Request, model: LiveSequence, progress: Progress) -> Iterator[int]:
    return generate_tokens(
        model,
        request.prompt_token_ids,
        partial(choose_token, params=request.params, seed=request.seed),
        end_ids=request.end_ids,
        max_tokens=request.max_tokens,
        progress=progress,
    )


def _watched(progress: Progress | None, is_cancelled: Callable[[], bool]) -> Progress:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)
        if is_cancelled() and done < total:
            raise _CancelledError

    return report
