"""A list of prompts: all answers in order, and the error of the first prompt that has one.

Unit of work: one list, from its requests to their outputs. The engine decides who runs, as for a server. The
list submits its prompts in order, as many answers as run together, so that no limit of the queue matters.
"""

from collections.abc import Callable, Sequence
from contextlib import closing

from coldstream.engine.answer import Request, completion
from coldstream.engine.events import Delta, Event, Failed
from coldstream.engine.request import Piece, RequestOutput
from coldstream.engine.shared_engine import CallerRequests
from coldstream.errors import ColdstreamError

ListProgress = Callable[[int, int], None]
"""Called with the number of finished requests of a list, and of all."""


def generate_list(
    requests: Sequence[Request], mine: CallerRequests, max_running: int, progress: ListProgress | None = None
) -> list[RequestOutput]:
    """All answers to each of `requests`, in order. `mine` is closed in the end.

    max_running: answers that the engine runs together.

    An error of a prompt's answer is raised once the prompts before it are done, so that it is always that of
    the first prompt with an error. Other errors, and those of `progress`, are raised at once. After an error
    the other requests of the list are cancelled.
    """
    with closing(mine):
        answers = _ListAnswers(requests, mine, max_running, progress)
        while not answers.are_done:
            answers.advance()
        return answers.outputs()


class _ListAnswers:
    """The answers of a list so far, and how many of its prompts are submitted."""

    def __init__(
        self,
        requests: Sequence[Request],
        mine: CallerRequests,
        max_running: int,
        progress: ListProgress | None,
    ) -> None:
        self._requests, self._mine, self._max_running = requests, mine, max_running
        self._progress = progress
        self._pieces: list[list[list[Piece]]] = [[[] for _ in range(each.params.n)] for each in requests]
        self._num_open = [each.params.n for each in requests]  # unfinished answers of each
        self._index: dict[int, int] = {}  # by request id, the place in the list
        self._num_submitted = 0
        self._num_running = 0  # unfinished answers of submitted requests
        self._num_finished = 0
        self._num_done = 0  # finished requests before the first unfinished one
        self._end = len(requests)  # the first request with an error
        self._error: ColdstreamError | None = None

    @property
    def are_done(self) -> bool:
        """Whether all answers are there, or those of the prompts before the first one with an error."""
        return self._num_done >= self._end

    def advance(self) -> None:
        """Submits as many prompts as can run, and takes an event."""
        while self._num_submitted < self._end and self._num_running < self._max_running:
            request = self._requests[self._num_submitted]
            self._index[self._mine.add(request)] = self._num_submitted
            self._num_submitted += 1
            self._num_running += request.params.n
        self._take(self._mine.next_event())
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

    def _take(self, event: Event) -> None:
        index = self._index[event.request_id]
        if isinstance(event, Delta):
            self._pieces[index][event.index].append(event.piece)
            if event.piece.finish_reason is not None:
                self._num_running -= 1
                self._num_open[index] -= 1
                if not self._num_open[index]:
                    self._finished_one()
        elif isinstance(event, Failed) and index < self._end:
            for request_id, other in self._index.items():
                if other > index:
                    self._mine.cancel(request_id)
            self._end, self._error = index, event.error

    def _finished_one(self) -> None:
        self._num_finished += 1
        if self._progress is not None:
            self._progress(self._num_finished, len(self._requests))
