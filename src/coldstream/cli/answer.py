"""Showing one answer: its text on standard output as it comes, its statistics on standard error."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from coldstream.cli.main import current_interrupts
from coldstream.cli.tables import width_of, wrap
from coldstream.cli.terminal import ProgressLine, note, visible
from coldstream.decoding import SpeculationStatistics
from coldstream.engine import Statistics, Stream
from coldstream.engine.request import FinishReason

if TYPE_CHECKING:  # which takes long, and only some models need
    from coldstream.cli.readable_answer import ReadableAnswer

SEPARATOR = " · "


@dataclass(frozen=True)
class ShownAnswer:
    """A shown answer, and how it ended."""

    text: str
    finish_reason: FinishReason
    statistics: Statistics
    ctx_size: int
    content: str = ""  # what a conversation keeps of it

    @property
    def fills_context(self) -> bool:
        """Whether there is no room for another token."""
        return self.statistics.prompt_tokens + self.statistics.generated_tokens >= self.ctx_size

    def describe(self) -> str:
        """One line: speeds, why it ended, how full the context is, and what ran.

        Speeds that nothing was measured for are left out: that of generating needs a second token.
        """
        s = self.statistics
        reused = f" ({s.reused_tokens} reused)" if s.reused_tokens else ""
        used = s.prompt_tokens + s.generated_tokens
        parts = [
            f"prompt {_count(s.prompt_tokens, 'token')}{reused}{_speed(s.prompt_tokens_per_s)}",
            f"generated {_count(s.generated_tokens, 'token')}{_speed(s.generated_tokens_per_s)}",
            f"first token {s.time_to_first_token_s:.2f} s" if s.generated_tokens else "",
            self.finish_reason,
            f"context {used} of {self.ctx_size}",
            "" if s.expert_hit_rate is None else f"{s.expert_hit_rate:.0%} of experts at hand",
            _drafts(s.speculation),
            f"{s.tier}, {_count(s.threads, 'thread')}",
            f"seed {s.seed}",
        ]
        return SEPARATOR.join(filter(None, parts))


@dataclass
class Interruption:
    """Ctrl-C while an answer is shown."""

    came: bool = False

    def missed(self, answer: ShownAnswer) -> bool:
        """Whether it came, and the answer had ended by itself."""
        return self.came and answer.finish_reason != "cancelled"


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


def show_answer(
    stream: Stream,
    line: ProgressLine,
    quiet: bool,
    ctx_size: int,
    before: str = "",
    reader: "ReadableAnswer | None" = None,
) -> ShownAnswer:
    """Write the answer as it comes, after the text `before`, then the statistics.

    `line` vanishes with the first piece. ctx_size: tokens that the context holds. reader: of an answer with
    marked control tokens.
    """
    writer = AnswerWriter(sys.stdout)
    written: list[str] = []
    with stream:
        for piece in stream:
            line.close()
            is_last = piece.finish_reason is not None
            text = piece.text if reader is None else reader.push(piece.text, is_last=is_last)
            writer.write(before + text)
            before = ""
            written.append(text)
    writer.end_line()
    shown = "".join(written)
    content = shown if reader is None else reader.content
    answer = ShownAnswer(shown, *piece.ending(), ctx_size, content)
    if not quiet:
        note("\n".join(wrap(answer.describe(), width_of(sys.stderr), SEPARATOR)))
    return answer


def _drafts(speculation: SpeculationStatistics | None) -> str:
    if speculation is None or not speculation.drafted:
        return ""
    uses = speculation.experts_per_draft
    experts = f", {uses[0]:.0f} experts a draft, {uses[1]:.0f} not at hand" if uses else ""
    return f"{speculation.tokens_per_step:.2f} tokens a step by {speculation.drafter}{experts}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _speed(tokens_per_s: float) -> str:
    return f", {tokens_per_s:.1f} tok/s" if tokens_per_s else ""


@contextmanager
def cancelled_by_interrupt(stream: Stream) -> Iterator[Interruption]:
    """Let Ctrl-C cancel the stream; at a second one before the block has ended, the program ends.

    Who shows the answer here, and keeps it, is not interrupted, and sees whether Ctrl-C came too late.
    """
    interrupts = current_interrupts()
    interruption = Interruption()

    def handle(signal_number: int, frame: FrameType | None) -> None:
        interruption.came = True
        stream.cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)
        if interrupts:
            interrupts.forget()
