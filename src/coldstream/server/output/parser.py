"""Distinguishes reasoning, content and calls in the text of an answer, while it comes.

Events do not depend on the pieces in which the text comes. Only the pieces of their own texts do.
A thought ends at its closing tag, or where a call of a known tool begins: models forget to close it. One that
never ends is reasoning to the last. Blanks around tags are no part of what lies between them.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from coldstream.server.output.call_format import Begun, CallFormat, CallReader, begins, num_held
from coldstream.server.output.control_text import ControlText, without_control
from coldstream.server.output.events import (
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallTruncated,
)
from coldstream.server.output.tools import ToolSignatures

THINK: Final = "<think>"
THINK_END: Final = "</think>"


@dataclass(frozen=True)
class ThoughtTags:
    """What thoughts begin and end with.

    label: a line that may follow the opening tag and belongs to it. may_repeat: whether a thought may also
    come behind text, and tags without a partner are nothing.
    """

    opening: str = THINK
    closing: str = THINK_END
    label: str = ""
    may_repeat: bool = False


class _TextPhase(Enum):
    HEAD = auto()  # nothing but blanks has come
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """The parser of one answer. The unit of work is `push`: a piece of text in, its events out."""

    def __init__(
        self,
        calls: CallFormat | None,
        tools: ToolSignatures,
        *,
        thoughts: ThoughtTags | None,
        is_thinking: bool,
        max_calls: int | None = None,
        control: Mapping[str, str] | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """calls: None if calls are content. thoughts: None if tags of thoughts do not count at all.
        is_thinking: whether the answer begins inside a thought. max_calls: with the end of so many the answer
        is complete, and nothing is emitted any more. control: what marked control tokens are, see
        `ControlText`; None: no tokens are marked.
        """
        self._thoughts = thoughts or ThoughtTags()
        self._control = None if control is None else ControlText(control)
        self._max_calls = max_calls
        self._calls, self._tools = (calls, tools) if tools.schemas else (None, tools)
        self._new_id = new_id
        self._text = ""  # text that is undecided
        self._phase = _TextPhase.HEAD if thoughts or is_thinking else _TextPhase.TEXT
        self._label = ""  # may still come
        self._is_thinking = is_thinking
        self._blanks = _Blanks(keeps_first=not is_thinking)
        self._readers: list[CallReader] = []  # readers of the present call and of those that follow it
        self._num_calls = 0
        self._read: list[str] = []  # texts of the call so far
        self._is_close_due = False  # a call has ended the thought, whose closing tag may follow
        self._has_content = False

    @property
    def is_complete(self) -> bool:
        """Whether the answer has as many calls as it may have."""
        return self._max_calls is not None and self._num_calls >= self._max_calls

    def push(self, text: str) -> list[OutputEvent]:
        """What is known now. Never raises."""
        self._text += text if self._control is None else self._control.push(text)
        return self._advance(is_last=False)

    def finish(self) -> list[OutputEvent]:
        """The rest, when nothing more will come."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        steps = {
            _TextPhase.HEAD: self._read_head,
            _TextPhase.THOUGHT: self._read_text,
            _TextPhase.TEXT: self._read_text,
            _TextPhase.CALL: self._read_call,
        }
        while not self.is_complete and steps[self._phase](events, is_last):
            pass
        if self.is_complete:
            self._text = ""
        return events

    def _read_head(self, events: list[OutputEvent], is_last: bool) -> bool:
        """Reads a tag before everything else. Whether to go on."""
        blanks = len(self._text) - len(self._text.lstrip())
        opening, closing = self._thoughts.opening, self._thoughts.closing
        tags = (opening,) if self._is_thinking else (opening, closing)
        tag = begins(self._text[blanks:], tags)
        if tag is True and not is_last:
            return False
        if isinstance(tag, str):
            self._text = self._text[blanks + len(tag) :]
            self._blanks = _Blanks(keeps_first=False)
        is_thought = tag == opening or (self._is_thinking and tag != closing)
        self._label = self._thoughts.label if tag == opening else ""
        self._phase = _TextPhase.THOUGHT if is_thought else _TextPhase.TEXT
        return True

    def _read_text(self, events: list[OutputEvent], is_last: bool) -> bool:
        """Reads text up to the next tag that counts. Whether to go on."""
        if self._label:
            found_label = begins(self._text, (self._label,))
            if found_label is True and not is_last:
                return False
            self._text = self._text.removeprefix(self._label)
            self._label = ""
        is_thought = self._phase is _TextPhase.THOUGHT
        openers = self._calls.openers if self._calls is not None else ()
        opening, closing = self._thoughts.opening, self._thoughts.closing
        tags = (*openers, closing) if is_thought or self._is_close_due else openers
        if self._thoughts.may_repeat:
            tags = (*openers, opening, closing)
        found = [(place, tag) for tag in tags if (place := self._text.find(tag)) >= 0]
        if not found:
            held = 0 if is_last else num_held(self._text, tags)
            self._emit(len(self._text) - held, events)
            if is_last:
                self._emit_blanks(events)
            return False
        place, tag = min(found)
        self._emit(place, events)
        if tag in (opening, closing):
            self._text = self._text[len(tag) :]
            self._end_thought(is_closed=True)
            if tag == opening:
                self._phase, self._label = _TextPhase.THOUGHT, self._thoughts.label
            return True
        assert self._calls is not None
        begun = self._calls.begin(self._text, self._tools, is_last=is_last, is_thinking=is_thought)
        if begun is True:
            return False
        if isinstance(begun, Begun):
            self._begin_call(begun, events)
        else:
            self._emit(1 if self._control is None else len(tag), events)
        return True

    def _begin_call(self, begun: Begun, events: list[OutputEvent]) -> None:
        if self._phase is _TextPhase.THOUGHT:
            self._end_thought(is_closed=False)
        self._readers, self._phase = list(begun.readers), _TextPhase.CALL
        self._read = [self._text[: begun.num_read]]
        self._text = self._text[begun.num_read :]
        self._emit_start(events)

    def _emit_start(self, events: list[OutputEvent]) -> None:
        events.append(ToolCallStart(self._num_calls, self._new_id(), self._readers[0].name))

    def _read_call(self, events: list[OutputEvent], is_last: bool) -> bool:
        """Reads on in a call. Whether to go on."""
        index = self._num_calls
        progress = self._readers[0].read(self._text, is_last=is_last)
        fragment = "".join(progress.fragments)
        if fragment:
            events.append(ToolCallArguments(index, fragment))
        self._read.append(self._text[: progress.num_read])
        self._text = self._text[progress.num_read :]
        if progress.has_ended:
            events.append(ToolCallEnd(index))
        elif is_last:
            events.append(ToolCallTruncated(index, without_control("".join(self._read) + self._text)))
            self._text = ""
        else:
            return False
        self._num_calls += 1
        del self._readers[0]
        self._read = []
        if self._readers and not self.is_complete:
            self._emit_start(events)
            return True
        self._phase = _TextPhase.TEXT
        self._blanks = _Blanks(keeps_first=self._has_content)
        return True

    def _end_thought(self, *, is_closed: bool) -> None:
        self._phase = _TextPhase.TEXT
        self._is_close_due = not is_closed
        self._blanks = _Blanks(keeps_first=self._has_content)

    def _emit(self, num_chars: int, events: list[OutputEvent]) -> None:
        """Emits the first characters of the text, all but blanks that a tag may follow."""
        text = self._blanks.push(self._text[:num_chars])
        self._text = self._text[num_chars:]
        self._emit_text(text, events)

    def _emit_blanks(self, events: list[OutputEvent]) -> None:
        """Emits blanks at the end of the answer, which no tag follows; those behind a call are none of it."""
        if self._num_calls == 0:
            self._emit_text(self._blanks.flush(), events)

    def _emit_text(self, text: str, events: list[OutputEvent]) -> None:
        text = text if self._control is None else without_control(text)
        if not text:
            return
        is_thought = self._phase is _TextPhase.THOUGHT
        self._has_content |= not is_thought
        events.append(Reasoning(text) if is_thought else Content(text))


class _Blanks:
    """Holds blanks back until text follows them."""

    def __init__(self, *, keeps_first: bool) -> None:
        self.held = ""
        self._keeps = keeps_first

    def push(self, text: str) -> str:
        """What is to be emitted now."""
        text = self.held + text
        kept = text.rstrip()
        self.held = text[len(kept) :]
        if not kept:
            return ""
        emitted = kept if self._keeps else kept.lstrip()
        self._keeps = True
        return emitted

    def flush(self) -> str:
        """The blanks that are held, unless nothing came before them that they could be part of."""
        return self.held if self._keeps else ""
