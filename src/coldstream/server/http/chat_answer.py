"""One answer of a chat: pieces of text become content, reasoning and calls, as deltas and as a message."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coldstream.engine.request import Piece, Statistics
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.server.http.accounts import ending_of
from coldstream.server.http.custom_tools import CustomInput
from coldstream.server.http.logprob_shapes import chat_logprobs
from coldstream.server.output import (
    AnswerParser,
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallTruncated,
)

Fields = dict[str, Any]


@dataclass
class _ToolCall:
    id: str
    name: str
    input: CustomInput | None  # input of a custom tool; None: the call is of a function
    texts: list[str] = field(default_factory=list)  # pieces of its arguments or input

    def shown(self, text: str, *, is_begun: bool = False) -> Fields:
        """The call with a text of its arguments or input; is_begun: as in all deltas but the first."""
        kind, part = ("function", "arguments") if self.input is None else ("custom", "input")
        if is_begun:
            return {kind: {part: text}}
        return {"id": self.id, "type": kind, kind: {"name": self.name, part: text}}


class ChatAnswer:
    """One answer, from its first piece to its last.

    num_top: likeliest tokens to report; None: none. custom_names: of the tools whose
    input is a text.
    """

    def __init__(
        self,
        parser: AnswerParser,
        tokenizer: Tokenizer,
        num_top: int | None,
        *,
        custom_names: Collection[str] = (),
    ) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._custom_names = custom_names
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _ToolCall] = {}
        self._all_logprobs: list[Fields] = []
        self._unsent_logprobs: list[Fields] = []
        self.reasoning_tokens = 0
        self.statistics: Statistics | None = None
        self.ending: Fields = {}

    def push(self, piece: Piece) -> list[Fields]:
        """The deltas that a piece gives, perhaps none: a tag may be under way. The last piece gives the rest,
        and sets `ending` and `statistics`.
        """
        events = self._parser.push(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        if self._num_top is not None:
            found = chat_logprobs(piece, self._tokenizer, self._num_top)
            self._all_logprobs += found
            self._unsent_logprobs += found
        deltas = [delta for event in events for delta in self._deltas(event)]
        if not self._content and not self._calls and self._reasoning:
            self.reasoning_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.statistics = piece.statistics
            self.ending = ending_of(piece, has_calls=bool(self._calls))
        return deltas

    def take_logprobs(self) -> Fields | None:
        """`logprobs` of the tokens since this was asked last; None if they are not wanted."""
        if self._num_top is None:
            return None
        taken, self._unsent_logprobs = self._unsent_logprobs, []
        return {"content": taken, "refusal": None}

    @property
    def logprobs(self) -> Fields | None:
        """`logprobs` of all tokens; None if they are not wanted."""
        return None if self._num_top is None else {"content": self._all_logprobs, "refusal": None}

    @property
    def message(self) -> Fields:
        """The whole answer as OpenAI's message."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: Fields = {"role": "assistant", "content": content or None, "refusal": None}
        if not self._calls:
            message["content"] = content
        if reasoning:
            message |= _reasoning(reasoning)
        if self._calls:
            message["tool_calls"] = [
                call.shown("".join(call.texts)) for _, call in sorted(self._calls.items())
            ]
        return message

    def _deltas(self, event: OutputEvent) -> Sequence[Fields]:
        match event:
            case Content(text=text):
                self._content.append(text)
                return [{"content": text}]
            case Reasoning(text=text):
                self._reasoning.append(text)
                return [_reasoning(text)]
            case ToolCallStart(index=index, id=call_id, name=name):
                reader = CustomInput() if name in self._custom_names else None
                self._calls[index] = _ToolCall(call_id, name, reader)
                return [_call_delta(index, self._calls[index].shown(""))]
            case ToolCallArguments(index=index, json_fragment=fragment):
                reader = self._calls[index].input
                return self._grown(index, fragment if reader is None else reader.push(fragment))
            case ToolCallEnd(index=index):
                reader = self._calls[index].input
                return self._grown(index, "" if reader is None else reader.finish())
            case ToolCallTruncated(index=index, text=text):
                # A call of which only a part was written is none. Who reads along has that part already.
                del self._calls[index]
                self._content.append(text)
                return [{"content": text}]
            case _:
                return []

    def _grown(self, index: int, text: str) -> list[Fields]:
        """The deltas for more text of a call's arguments or input."""
        call = self._calls[index]
        call.texts.append(text)
        return [_call_delta(index, call.shown(text, is_begun=True))] if text else []


def _reasoning(text: str) -> Fields:
    """Under the two names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(index: int, call: Mapping[str, Any]) -> Fields:
    return {"tool_calls": [{"index": index, **call}]}
