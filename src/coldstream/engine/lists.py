"""A list of prompts on an engine of its own, which begins with the live sequence and leaves the last one.

Unit of work: one list, from its requests to their outputs. The engine decides who runs, as for a server; the
list feeds it in order, so that no bound of its queue matters, and keeps an error until it is known to be that
of the first prompt with one. Knows neither threads nor text.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta, Event, Failed
from coldstream.engine.generation import Request, completion
from coldstream.engine.limits import EngineLimits
from coldstream.engine.live_sequence import LiveSequence
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.request import Piece, RequestOutput
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError

# Nobody watches the answers of a list grow, so steps have as many rows of prompts as they take.
_LIMITS: Final = EngineLimits(target_step_ms=math.inf)


def generate_list(
    requests: Sequence[Request],
    live: LiveSequence,
    opened: OpenedModel,
    between_steps: Callable[[], None],
) -> list[RequestOutput]:
    """All answers to each of `requests`, at least one, in order. `live`, of the runner of `opened`, then
    holds the last answer, or as much of it as is still in memory.

    An error of a prompt's answer is raised once the prompts before it are done, so that it is always that of
    the first prompt with an error. Other errors, and those of `between_steps`, are raised at once. After an
    error there are no sequences, and `live` is empty.
    """
    with _engine_from(live, opened) as engine:
        answers = _Answers(requests, engine)
        while not answers.are_done:
            answers.step()
            between_steps()
        outputs = answers.outputs()
        # A row that follows the last token may be under way, after which the sequence is worth keeping.
        engine.step()
        last = outputs[-1]
        _leave(engine, [*last.prompt_token_ids, *last.outputs[-1].token_ids], live, opened)
    return outputs


class _Answers:
    """What a list has of its answers, and how far the engine is fed with its prompts.

    A request's id is its place in the list.
    """

    def __init__(self, requests: Sequence[Request], engine: Engine) -> None:
        self._requests = requests
        self._engine = engine
        self._pieces: list[list[list[Piece]]] = [[[] for _ in range(each.params.n)] for each in requests]
        self._num_open = [each.params.n for each in requests]  # answers of each that are not finished
        self._num_fed = 0
        self._num_running = 0  # answers that the engine has
        self._num_done = 0  # requests, all up to the first that is not
        self._end = len(requests)  # the first request with an error
        self._error: ColdstreamError | None = None

    @property
    def are_done(self) -> bool:
        """Whether all answers are there, or those of the prompts before the first one with an error."""
        return self._num_done >= self._end

    def step(self) -> None:
        """Feeds the engine with as many answers as it runs, so that none waits there without need, and has it
        take a step.
        """
        while self._num_fed < self._end and self._num_running < self._engine.max_running:
            request = self._requests[self._num_fed]
            self._engine.add(Submission(self._num_fed, request, comes_again=False))
            self._num_fed += 1
            self._num_running += request.params.n
        for event in self._engine.step():
            self._hear(event)
        while self._num_done < self._end and not self._num_open[self._num_done]:
            self._num_done += 1

    def outputs(self) -> list[RequestOutput]:
        """The outputs of all requests, once they are done. Raises the error of the first that has one."""
        if self._error is not None:
            raise self._error
        return [
            RequestOutput(
                request.prompt,
                request.prompt_token_ids,
                tuple(completion(index, pieces) for index, pieces in enumerate(answers)),
            )
            for request, answers in zip(self._requests, self._pieces, strict=True)
        ]

    def _hear(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._pieces[event.request_id][event.index].append(event.piece)
            if event.piece.finish_reason is not None:
                self._num_open[event.request_id] -= 1
                self._num_running -= 1
        elif isinstance(event, Failed) and event.request_id < self._end:
            for useless in range(event.request_id + 1, self._num_fed):
                self._engine.cancel(useless)
            self._end, self._error = event.request_id, event.error


@contextmanager
def _engine_from(live: LiveSequence, opened: OpenedModel) -> Iterator[Engine]:
    """An engine that has the live sequence as a kept prefix. All that it still has at the end is freed."""
    with closing(Engine(opened, _LIMITS)) as engine:
        token_ids, sequence = live.hand_over()
        try:
            if token_ids:
                engine.keep_prefix(token_ids, sequence)
        finally:
            opened.runner.release(sequence)
        yield engine


def _leave(engine: Engine, token_ids: Sequence[int], live: LiveSequence, opened: OpenedModel) -> None:
    """Makes what the engine has kept of these tokens, from the first on, the live sequence."""
    prefix = engine.kept_prefix(token_ids)
    if prefix.length:
        live.hold(list(token_ids[: prefix.length]), prefix.sequence)
    else:
        opened.runner.release(prefix.sequence)
