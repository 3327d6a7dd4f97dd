"""An answer on the screen: how it ended, and what a terminal may not get."""

import io
import signal
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from coldstream.cli.answer import AnswerWriter, ShownAnswer, cancelled_by_interrupt
from coldstream.engine import Statistics


def answer(prompt: int, generated: int, ctx_size: int) -> ShownAnswer:
    statistics = Statistics(prompt, 0, generated, 0.5, 1.0, "none", 1, 7)
    return ShownAnswer("text", "length", statistics, ctx_size)


@pytest.mark.parametrize(("generated", "is_full"), [(5, False), (6, True), (7, True)])
def test_a_context_is_full_once_no_token_fits(generated: int, is_full: bool) -> None:
    assert answer(10, generated, 16).fills_context == is_full


def test_speeds_that_nothing_was_measured_for_are_left_out() -> None:
    assert answer(1, 1, 16).describe() == (
        "prompt 1 token, 2.0 tok/s · generated 1 token · first token 0.50 s · length · context 2 of 16 · "
        "none, 1 thread · seed 7"
    )
    assert "generated 3 tokens, 2.0 tok/s" in answer(1, 3, 16).describe()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_terminal_gets_no_control_characters_and_a_file_all_of_them(kind: type[io.StringIO]) -> None:
    out = kind()
    writer = AnswerWriter(out)
    writer.write("")
    writer.end_line()
    assert out.getvalue() == ""
    writer.write("a\x1b[2J\n\tb")
    writer.end_line()
    writer.end_line()
    shown = out.getvalue()
    assert ("\x1b" in shown) == (kind is io.StringIO)
    assert shown.startswith("a")
    assert shown.endswith("\n\tb\n")


def test_the_handler_of_ctrl_c_is_given_back() -> None:
    class Stream:
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    def handler(number: int, frame: FrameType | None) -> None:
        raise AssertionError("while an answer is shown")

    stream: Any = Stream()
    before = signal.signal(signal.SIGINT, handler)
    try:
        with cancelled_by_interrupt(stream) as interruption:
            assert not interruption.came
            signal.raise_signal(signal.SIGINT)
        assert stream.cancelled == 1
        assert interruption.missed(answer(1, 1, 16))
        assert not interruption.missed(replace(answer(1, 1, 16), finish_reason="cancelled"))
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
