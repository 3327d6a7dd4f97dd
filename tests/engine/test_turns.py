"""Requests of several threads: who waits, who is refused, and what closing does to them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coldstream.engine import LLM, Piece, RequestOutput, SamplingParams
from coldstream.engine.turns import Turns
from coldstream.errors import InvalidRequestError
from hash_runner import HashRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
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


@contextmanager
def another_thread_in(turns: Turns) -> Iterator[None]:
    """Another thread has the turn."""
    has_turn, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with turns.turn():
            has_turn.set()
            assert may_leave.wait(PATIENCE_S)

    staying = Result(stay)
    assert has_turn.wait(PATIENCE_S)
    try:
        yield
    finally:
        may_leave.set()
        staying.get()


def test_turns_are_given_in_the_order_of_asking() -> None:
    turns, order = Turns(), []
    waiting = []

    def ask(number: int, has_asked: threading.Event) -> None:
        def is_cancelled() -> bool:
            has_asked.set()  # asked of threads that stand in the queue
            return False

        with turns.turn(is_cancelled) as is_mine:
            assert is_mine
            order.append(number)

    with another_thread_in(turns):
        for number in range(8):
            has_asked = threading.Event()
            waiting.append(Result(lambda n=number, e=has_asked: ask(n, e)))  # type: ignore[misc]
            assert has_asked.wait(PATIENCE_S)
        assert order == []
    for result in waiting:
        result.get()
    assert order == list(range(8))


def test_who_is_cancelled_leaves_the_queue_and_the_others_keep_their_places() -> None:
    turns, order = Turns(), []
    cancelled = threading.Event()
    queued = [threading.Event() for _ in range(2)]

    def ask(number: int) -> bool:
        def is_cancelled() -> bool:
            queued[number].set()
            return number == 0 and cancelled.is_set()

        with turns.turn(is_cancelled) as is_mine:
            order.append((number, is_mine))
            return is_mine

    with another_thread_in(turns):
        first = Result(lambda: ask(0))
        assert queued[0].wait(PATIENCE_S)
        second = Result(lambda: ask(1))
        assert queued[1].wait(PATIENCE_S)
        cancelled.set()
        turns.wake()
        assert not first.get()
        assert order == [(0, False)]
    assert second.get()
    assert order == [(0, False), (1, True)]


def test_a_turn_ends_with_an_error_too() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.turn():
        raise ZeroDivisionError
    Result(lambda: turns.turn().__enter__()).get()


def test_ending_waits_for_what_computes_and_refuses_who_waits() -> None:
    turns, order = Turns(), []
    has_turn, queued = threading.Event(), threading.Event()

    def compute() -> None:
        with turns.turn():
            has_turn.set()
            assert queued.wait(PATIENCE_S)
            assert "closed" in call_until_refused(turns.check)
            order.append("computed")

    def wait() -> None:
        def is_cancelled() -> bool:
            queued.set()
            return False

        with turns.turn(is_cancelled):
            order.append("a turn after the end")

    computing = Result(compute)
    assert has_turn.wait(PATIENCE_S)
    waiting = Result(wait)
    assert queued.wait(PATIENCE_S)
    turns.end()
    order.append("ended")
    computing.get()
    with pytest.raises(InvalidRequestError, match="closed"):
        waiting.get()
    assert order == ["computed", "ended"]
    with pytest.raises(InvalidRequestError, match="closed"), turns.turn():
        pass


def test_a_second_thread_waits_for_its_turn(llm: LLM) -> None:
    expected = llm.generate(["the", "def"], GREEDY)
    stream = llm.stream("the", GREEDY)
    pieces = [next(stream)]
    others = [
        Result(lambda: llm.generate("def", GREEDY)),
        Result(lambda: list(llm.stream("def", GREEDY))),
        Result(lambda: llm.logits([1, 2])),
    ]
    pieces += stream
    assert "".join(piece.text for piece in pieces) == expected[0].text
    assert others[0].get()[0].token_ids == expected[1].token_ids
    assert "".join(piece.text for piece in others[1].get()) == expected[1].text
    assert (others[2].get() == llm.logits([1, 2])).all()


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


def test_a_thread_with_an_open_stream_is_refused_another_request(llm: LLM, runner: HashRunner) -> None:
    stream = llm.stream("the", GREEDY)
    next(stream)
    computed = runner.computed
    for request in (
        lambda: llm.generate("the", GREEDY),
        lambda: llm.logits([1]),
        lambda: next(llm.stream("the", GREEDY)),
    ):
        with pytest.raises(InvalidRequestError, match="this thread has a stream that is not finished"):
            request()
    assert runner.computed == computed
    stream.close()
    assert llm.generate("the", GREEDY)


def test_a_request_from_inside_a_request_is_refused(llm: LLM) -> None:
    errors: list[str] = []

    def ask_again(done: int, total: int) -> None:
        for call in (lambda: llm.generate("the"), llm.close, stream.close, lambda: next(stream)):
            with pytest.raises(InvalidRequestError) as caught:
                call()
            errors.append(str(caught.value))

    stream = llm.stream("the", GREEDY, progress=ask_again)
    assert len(list(stream)) == 13
    expected = ["stream that is not finished", "cannot be closed", "cannot close", "cannot take"]
    assert all(text in error for text, error in zip(expected, errors, strict=True))


def test_a_stream_belongs_to_the_thread_that_last_took_a_piece(llm: LLM) -> None:
    (whole,) = llm.generate("the", GREEDY)
    stream = llm.stream("the", GREEDY)

    def take_and_ask() -> Piece:
        piece = next(stream)
        with pytest.raises(InvalidRequestError, match="this thread has a stream that is not finished"):
            llm.generate("def", GREEDY)
        return piece

    pieces = [next(stream), Result(take_and_ask).get()]
    # It is not this thread's any more, so that this one may wait for the end of it.
    last_piece_taken = Result(lambda: pieces.extend(stream))
    (after,) = llm.generate("def", GREEDY)
    last_piece_taken.get()
    assert "".join(piece.text for piece in pieces) == whole.text
    assert after.token_ids == llm.generate("def", GREEDY)[0].token_ids


def test_two_threads_that_take_pieces_of_one_stream_get_each_piece_once(llm: LLM) -> None:
    (whole,) = llm.generate("the", GREEDY)
    stream = llm.stream("the", GREEDY)
    barrier = threading.Barrier(2)

    def take() -> list[int]:
        barrier.wait(PATIENCE_S)
        return [token_id for piece in stream for token_id in piece.token_ids]

    first, second = Result(take), Result(take)
    assert sorted(first.get() + second.get()) == sorted(whole.token_ids)


def test_a_stream_that_waits_can_be_cancelled_and_closed(llm: LLM, runner: HashRunner) -> None:
    holding = llm.stream("the", GREEDY)
    next(holding)
    computed = runner.computed
    cancelled, closed = llm.stream("def", GREEDY), llm.stream("def", GREEDY)
    of_cancelled, of_closed = Result(lambda: list(cancelled)), Result(lambda: list(closed))
    cancelled.cancel()
    (piece,) = of_cancelled.get()
    assert (piece.finish_reason, piece.statistics.generated_tokens) == ("cancelled", 0)
    closed.close()
    assert [piece.finish_reason for piece in of_closed.get()] in ([], ["cancelled"])
    assert runner.computed == computed
    holding.close()
    assert llm.generate("def", GREEDY)


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
    assert len(taking.get().token_ids) == 1
    closing.get()
    assert list(stream) == []
    assert llm.generate("the", GREEDY)


def test_closing_waits_for_the_token_that_another_thread_computes(llm: LLM, runner: HashRunner) -> None:
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
    assert runner.computed == 16


def test_a_waiting_request_hears_of_closing(llm: LLM) -> None:
    stream = llm.stream("the", GREEDY)
    next(stream)
    waiting = Result(lambda: llm.generate("def", GREEDY))
    llm.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        waiting.get()
    with pytest.raises(InvalidRequestError, match="closed"):
        next(stream)
