"""One engine for many threads and streams: who computes, who is refused, and what closing does to them."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coldstream.engine import LLM, Piece, RequestOutput, SamplingParams
from coldstream.engine.events import Delta
from coldstream.engine.request_reader import RequestReader
from coldstream.errors import InvalidRequestError
from hash_runner import HashRunner
from plain_loop import plain_output

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=5)
PATIENCE_S = 10.0  # of a test that would hang otherwise; nothing waits that long


class Result:
    """What a function gave or raised in another thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._value: Any = None
        self._error: Exception | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except Exception as error:
            self._error = error

    def get(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a thread hangs"
        if self._error is not None:
            raise self._error
        return self._value


class Gate:
    """A logits processor that says when computing has come to it, and goes on when it may."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, context: Sequence[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)
        return logits


def call_until_refused(function: Callable[[], Any]) -> str:
    """Call it again and again until another thread has begun to close; what the refusal said."""
    while True:
        try:
            function()
        except InvalidRequestError as error:
            return str(error)


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_streams_of_one_thread_run_side_by_side(llm: LLM, runner: HashRunner) -> None:
    """Each gets its own answer, in whatever order pieces are taken; a step has rows of all of them."""
    prompts = [[1, 2], [3], [4, 5, 6]]
    wanted = [plain_output(llm.opened, prompt, SEEDED) for prompt in prompts]
    computed = runner.computed
    streams = [llm.stream(prompt, SEEDED) for prompt in prompts]
    pieces: list[list[Piece]] = [[next(stream)] for stream in streams]
    for turn in range(40):
        index = turn * 7 % 3
        pieces[index] += [piece for piece in [next(streams[index], None)] if piece is not None]
    for index, stream in enumerate(streams):
        pieces[index] += stream
    assert [text_of(each) for each in pieces] == [each.text for each in wanted]
    assert runner.computed - computed == sum(len(prompt) + 11 for prompt in prompts)


def test_requests_between_two_pieces_of_a_stream(llm: LLM) -> None:
    wanted = [plain_output(llm.opened, prompt, GREEDY).token_ids for prompt in ([1, 2], [3], [4])]
    stream = llm.stream([1, 2], GREEDY)
    pieces = [next(stream)]
    assert [each.token_ids for each in llm.generate([[3], [4]], GREEDY)] == wanted[1:]
    assert llm.generate([[3]], GREEDY)[0].token_ids == wanted[1]
    assert llm.logits([1, 2]).shape == (2, 320)
    llm.forget()
    pieces += stream
    assert tuple(token_id for piece in pieces for token_id in piece.token_ids) == wanted[0]


def test_nothing_is_computed_while_nobody_asks(llm: LLM, runner: HashRunner) -> None:
    stream = llm.stream([1] * 100, GREEDY)
    assert runner.computed == 0
    next(stream)
    computed = runner.computed
    other = llm.stream([2] * 100, GREEDY)
    assert runner.computed == computed
    other.close()
    stream.close()
    assert runner.computed == computed


def test_many_threads_get_the_answers_of_one(llm: LLM) -> None:
    prompts = [[1, 2], [1, 2, 3], [4], [5, 6]]
    params = SamplingParams(seed=7, max_tokens=6, ignore_eos=True, n=2)
    expected = [llm.generate([prompt], params)[0] for prompt in prompts]
    barrier = threading.Barrier(4)

    def ask(prompt: list[int]) -> list[RequestOutput]:
        barrier.wait(PATIENCE_S)
        return [llm.generate([prompt], params)[0] for _ in range(5)]

    results = [Result(lambda p=prompt: ask(p)) for prompt in prompts]  # type: ignore[misc]
    for result, wanted in zip(results, expected, strict=True):
        for output in result.get():
            assert [answer.token_ids for answer in output.outputs] == [
                answer.token_ids for answer in wanted.outputs
            ]


def test_a_thread_that_waits_gets_the_pieces_that_another_one_computes(llm: LLM, runner: HashRunner) -> None:
    gate = Gate()
    (wanted,) = llm.generate([[3]], GREEDY)
    first = Result(lambda: llm.generate([[1, 2]], replace(GREEDY, logits_processors=(gate,))))
    assert gate.reached.wait(PATIENCE_S)
    second = Result(lambda: llm.generate([[3]], GREEDY))
    gate.opened.set()
    assert second.get()[0].token_ids == wanted.token_ids
    assert len(first.get()[0].token_ids) == 12


def test_an_error_of_one_thread_is_not_that_of_another(llm: LLM) -> None:
    def fail(context: Sequence[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raise ZeroDivisionError

    failing, stream = replace(GREEDY, logits_processors=(fail,)), llm.stream([1, 2], GREEDY)
    pieces = [next(stream)]
    with pytest.raises(InvalidRequestError, match="ZeroDivisionError"):
        llm.generate([[3]], failing)
    pieces += stream
    assert text_of(pieces) == plain_output(llm.opened, [1, 2], GREEDY).text


def test_a_step_cannot_be_asked_from_inside_a_step(llm: LLM) -> None:
    errors: list[str] = []

    def ask_again(context: Sequence[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        for call in (lambda: llm.generate("the"), llm.close, stream.close, lambda: next(stream), llm.forget):
            with pytest.raises(InvalidRequestError) as caught:
                call()
            errors.append(str(caught.value))
        return logits

    stream = llm.stream("the", replace(GREEDY, logits_processors=(ask_again,)))
    assert len(list(stream)) == 13
    called = "a function that a step calls"
    expected = [called, "cannot be closed", "cannot close", "cannot take", called]
    assert len(errors) == 12 * 5
    assert all(text in error for text, error in zip(expected * 12, errors, strict=True))


def test_progress_may_use_the_model(llm: LLM) -> None:
    wanted = llm.generate([[3]], GREEDY)[0].token_ids
    found: list[tuple[int, ...]] = []
    pieces = list(
        llm.stream(
            [1] * 20, GREEDY, progress=lambda *_: found.append(llm.generate([[3]], GREEDY)[0].token_ids)
        )
    )
    assert found == [wanted] * 4
    assert len(pieces) == 13


def test_two_threads_that_take_pieces_of_one_stream_get_each_piece_once(llm: LLM) -> None:
    (whole,) = llm.generate("the", GREEDY)
    stream = llm.stream("the", GREEDY)
    barrier = threading.Barrier(2)

    def take() -> list[int]:
        barrier.wait(PATIENCE_S)
        return [token_id for piece in stream for token_id in piece.token_ids]

    first, second = Result(take), Result(take)
    assert sorted(first.get() + second.get()) == sorted(whole.token_ids)


def test_a_stream_that_waits_can_be_cancelled_and_closed(llm: LLM) -> None:
    gate = Gate()
    holding = Result(lambda: llm.generate("the", replace(GREEDY, logits_processors=(gate,))))
    assert gate.reached.wait(PATIENCE_S)
    cancelled, closed = llm.stream("def", GREEDY), llm.stream("def", GREEDY)
    of_cancelled, of_closed = Result(lambda: list(cancelled)), Result(lambda: list(closed))
    cancelled.cancel()
    closing = Result(closed.close)
    gate.opened.set()
    assert of_cancelled.get()[-1].finish_reason == "cancelled"
    assert [piece.finish_reason for piece in of_closed.get()][-1:] in ([], ["cancelled"])
    closing.get()
    assert len(holding.get()[0].token_ids) == 12
    assert llm.generate("def", GREEDY)


def test_a_request_cancelled_before_the_engine_knows_it_computes_nothing(
    llm: LLM, runner: HashRunner
) -> None:
    """Also if another caller uses the engine in between."""
    request = RequestReader(llm.opened).of_prompt([1, 2], "prompt", GREEDY)
    with closing(llm._engine.requests()) as mine:
        mine.cancel(mine.add(request))
        llm.forget()
        (event,) = [mine.next_event()]
    assert isinstance(event, Delta)
    assert event.piece.finish_reason == "cancelled"
    assert runner.computed == 0


def test_a_stream_cancelled_before_its_first_piece_computes_nothing(llm: LLM, runner: HashRunner) -> None:
    for logprobs, of_no_token in ((None, None), (2, ())):
        stream = llm.stream("the", replace(GREEDY, logprobs=logprobs))
        stream.cancel()
        (piece,) = stream
        assert (piece.finish_reason, piece.logprobs) == ("cancelled", of_no_token)
    assert runner.computed == 0


def test_a_stream_is_closed_by_another_thread_after_the_piece_it_computes(llm: LLM) -> None:
    gate = Gate()
    stream = llm.stream("the", replace(GREEDY, logits_processors=(gate,)))
    taking = Result(lambda: next(stream))
    assert gate.reached.wait(PATIENCE_S)
    closing = Result(stream.close)
    gate.opened.set()
    assert len(taking.get().token_ids) <= 1
    closing.get()
    assert list(stream) == []
    assert llm.generate("the", GREEDY)


def test_what_is_left_open_frees_its_memory_with_the_next_step(llm: LLM, runner: HashRunner) -> None:
    llm.generate([[9]], replace(GREEDY, max_tokens=1))
    llm.forget()
    free = runner.free
    for leave in (lambda stream: stream.close(), lambda stream: None):
        stream = llm.stream([1, 2], GREEDY)
        next(stream)
        assert runner.free != free
        leave(stream)
        del stream
        llm.generate([[9]], replace(GREEDY, max_tokens=1))
        llm.forget()
        assert runner.free == free


def test_closing_waits_for_the_step_that_another_thread_takes(llm: LLM, runner: HashRunner) -> None:
    gate = Gate()
    was_closed = []

    def look(context: Sequence[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        was_closed.append(runner.closed)
        return logits

    generating = Result(lambda: llm.generate("the", replace(GREEDY, logits_processors=(gate, look))))
    assert gate.reached.wait(PATIENCE_S)
    waiting = Result(lambda: llm.generate("def", GREEDY))
    closing = [Result(llm.close), Result(llm.close)]
    gate.opened.set()
    for result in closing:
        result.get()
    assert runner.closed
    assert not any(was_closed)
    for result in (generating, waiting):
        with suppress(InvalidRequestError):  # unless it was done before anybody closed anything
            result.get()


def test_closing_ends_a_long_prompt_at_its_next_chunk(llm: LLM, runner: HashRunner) -> None:
    first_chunk_done, refusals = threading.Event(), list[str]()

    def progress(done: int, total: int) -> None:
        first_chunk_done.set()
        if not refusals:
            refusals.append(call_until_refused(lambda: llm.generate([])))

    reading = Result(lambda: list(llm.stream([1] * 100, GREEDY, progress=progress)))
    assert first_chunk_done.wait(PATIENCE_S)
    llm.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        reading.get()
    assert runner.computed == 8


def test_a_waiting_request_is_refused_by_closing(llm: LLM) -> None:
    gate = Gate()
    stream = llm.stream("the", replace(GREEDY, logits_processors=(gate,)))
    taking = Result(lambda: list(stream))
    assert gate.reached.wait(PATIENCE_S)
    waiting, closing = Result(lambda: llm.generate("def", GREEDY)), Result(llm.close)
    call_until_refused(lambda: llm.generate([]))
    gate.opened.set()
    closing.get()
    for result in (taking, waiting):
        with pytest.raises(InvalidRequestError, match="closed"):
            result.get()
    with pytest.raises(InvalidRequestError, match="closed"):
        llm.logits([1])
