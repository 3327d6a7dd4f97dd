"""Showing one answer: its text on standard output as it comes, its statistics on standard error."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from coldstream.cli.terminal import ProgressLine, note, visible
from coldstream.engine import Statistics, Stream
from coldstream.engine.request import FinishReason


@dataclass(frozen=True)
class Answer:
    """What was shown, and how it ended."""

    text: str
    finish_reason: FinishReason
    statistics: Statistics

    def describe(self) -> str:
        """One line: speeds, why it ended, and what ran."""
        s = self.statistics
        reused = f" ({s.reused_tokens} reused)" if s.reused_tokens else ""
        hits = "" if s.expert_hit_rate is None else f"{s.expert_hit_rate:.0%} of experts at hand · "
        return (
            f"prompt {s.prompt_tokens} tokens{reused}, {s.prompt_tokens_per_s:.1f} tok/s · "
            f"generated {s.generated_tokens} tokens, {s.generated_tokens_per_s:.1f} tok/s · "
            f"first token {s.time_to_first_token_s:.2f} s · {self.finish_reason} · {hits}"
            f"{s.tier}, {s.threads} threads · seed {s.seed}"
        )


class AnswerWriter:
    """Writes streamed text to `out` at once; to a terminal with control characters escaped."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._ended_line = True

    def write(self, text: str) -> None:
        if text:
            self._ended_line = text.endswith("\n")
            self._out.write(visible(text) if self._is_terminal else text)
            self._out.flush()

    def end_line(self) -> None:
        """Make sure that what follows starts on a new line."""
        if not self._ended_line:
            self.write("\n")


def show_answer(stream: Stream, line: ProgressLine, quiet: bool, before: str = "") -> Answer:
    """Write the answer as it comes, after the text `before`, then the statistics; Ctrl-C ends it early.

    `line` vanishes with the first piece.
    """
    writer = AnswerWriter(sys.stdout)
    written: list[str] = []
    with stream, cancelled_by_interrupt(stream):
        for piece in stream:
            line.close()
            writer.write(before + piece.text)
            before = ""
            written.append(piece.text)
    writer.end_line()
    answer = Answer("".join(written), *piece.ending())
    if not quiet:
        note(answer.describe())
    return answer


@contextmanager
def cancelled_by_interrupt(stream: Stream) -> Iterator[None]:
    """Let the first Ctrl-C cancel the stream and the second one raise KeyboardInterrupt."""

    def handle(signal_number: int, frame: FrameType | None) -> None:
        stream.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
