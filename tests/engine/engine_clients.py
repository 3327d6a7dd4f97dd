"""Engines for tests, what requests get from them, and what they get alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from coldstream.decoding import Logits, derived_seed
from coldstream.engine import LLM, CompletionOutput, OpenedModel, Piece, SamplingParams
from coldstream.engine.answer import completion
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta, Event, Failed, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.request_reader import RequestReader
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError
from coldstream.kvcache import Batch
from coldstream.models.runner import ModelRunner
from plain_loop import plain_output

Answer = tuple[object, ...]


class FakeClock:
    """Time that goes on by a fixed amount with every look at it."""

    def __init__(self, tick: float = 0.001) -> None:
        self.now, self.tick = 100.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Client:
    """Requests to one engine and all that was reported of them."""

    def __init__(self, engine: Engine, opened: OpenedModel) -> None:
        self.engine = engine
        self._reader = RequestReader(opened)
        self._ids = count()
        self._num_answers: dict[int, int] = {}
        self.events: dict[int, list[Event]] = {}

    def add(self, prompt: Sequence[int], params: SamplingParams, **how: object) -> int:
        """Submits a prompt; the request's id."""
        request_id = next(self._ids)
        request = self._reader.of_prompt(list(prompt), "prompt", params)
        self.engine.add(Submission(request_id, request, **how))  # type: ignore[arg-type]
        self.events[request_id] = []
        self._num_answers[request_id] = params.n
        return request_id

    def step(self) -> list[Event]:
        events = self.engine.step()
        for event in events:
            assert not self.is_over(event.request_id), "nothing follows the end of a request"
            self.events[event.request_id].append(event)
        return events

    def drain(self, most_steps: int = 20000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(most_steps):
            if self.engine.is_idle:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def pieces(self, request_id: int) -> dict[int, list[Piece]]:
        """By index of the answer."""
        pieces: dict[int, list[Piece]] = {}
        for event in self.events[request_id]:
            if isinstance(event, Delta):
                pieces.setdefault(event.index, []).append(event.piece)
        return pieces

    def tokens_so_far(self, request_id: int) -> list[int]:
        """Of the first answer."""
        pieces = self.pieces(request_id).get(0, [])
        return [token_id for piece in pieces for token_id in piece.token_ids]

    def outputs(self, request_id: int) -> list[CompletionOutput]:
        pieces = self.pieces(request_id)
        return [completion(index, pieces[index]) for index in sorted(pieces)]

    def answers(self, request_id: int) -> list[Answer]:
        return [answer_of(output) for output in self.outputs(request_id)]

    def error(self, request_id: int) -> ColdstreamError | None:
        last = self.events[request_id][-1]
        return last.error if isinstance(last, Failed) else None

    def num_reused(self, request_id: int) -> int:
        first = self.events[request_id][0]
        assert isinstance(first, Started)
        return first.num_reused

    def is_over(self, request_id: int) -> bool:
        events = self.events[request_id]
        num_ended = sum(isinstance(each, Delta) and each.piece.finish_reason is not None for each in events)
        has_failed = bool(events) and isinstance(events[-1], Failed)
        return has_failed or num_ended == self._num_answers[request_id]


@contextmanager
def engine_of(
    opened: OpenedModel, limits: EngineLimits | None = None, clock: FakeClock | None = None
) -> Iterator[Client]:
    """A client of a new engine, which leaves the model's memory as it found it."""
    before = opened.runner.free
    engine = Engine(opened, limits or EngineLimits(), clock or FakeClock())
    yield Client(engine, opened)
    engine.check_integrity()
    engine.close()
    assert opened.runner.free == before, "all memory is given back"


def answer_of(output: CompletionOutput) -> Answer:
    """All that an answer says but for times and what was reused."""
    statistics = output.statistics
    counts = (statistics.prompt_tokens, statistics.generated_tokens, statistics.seed)
    return (*(value for name, value in vars(output).items() if name not in ("index", "statistics")), counts)


def alone(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> list[Answer]:
    """Each answer by the plain loop, which needs the memory that `llm` keeps prefixes in."""
    assert params.seed is not None
    llm.forget()
    own = [replace(params, n=1, seed=derived_seed(params.seed, index)) for index in range(params.n)]
    return [answer_of(plain_output(llm.opened, prompt, each)) for each in own]


def rows_of_steps(
    runner: ModelRunner,
    clock: FakeClock | None = None,
    seconds_of_row: float = 0.0,
    more_expensive: float = 1.0,
) -> list[list[int]]:
    """Rows of each segment of every step from now on, each of which takes so long by `clock`.

    more_expensive: so many times as long in steps of several segments.
    """
    steps: list[list[int]] = []
    step = runner.step

    def counted(batch: Batch) -> tuple[Logits, ...]:
        steps.append([len(segment.token_ids) for segment in batch.segments])
        if clock is not None:
            clock.now += seconds_of_row * sum(steps[-1]) * (more_expensive if len(steps[-1]) > 1 else 1)
        return step(batch)

    runner.step = counted  # type: ignore[method-assign]
    return steps
