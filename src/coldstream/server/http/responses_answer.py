"""One answer as items of OpenAI's responses API: whole, and as the events that build it."""

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from coldstream.engine.request import Piece, Statistics
from coldstream.server.http.accounts import ending_of
from coldstream.server.http.client_tools import CLIENT_TOOLS, ClientTool
from coldstream.server.http.custom_tools import CustomInput
from coldstream.server.http.responses_history import sealed
from coldstream.server.http.responses_tools import OfferedTool, OfferedTools
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

# By the type of an item: what its deltas are called, and the type of its only part, or the field of its text.
_DELTAS: Final = {
    "message": ("response.output_text", "output_text"),
    "reasoning": ("response.reasoning_text", "reasoning_text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
_WITH_PARTS: Final = ("message", "reasoning")


class ResponseItems:
    """The items of one answer, from its first piece to its last.

    logprobs: gives those of a piece's tokens; the messages' are reported. None: none are.
    has_sealed_thoughts: whether thoughts come as `sealed`, too.
    """

    def __init__(
        self,
        parser: AnswerParser,
        tools: OfferedTools,
        *,
        logprobs: Callable[[Piece], list[Fields]] | None = None,
        has_sealed_thoughts: bool = False,
    ) -> None:
        self._parser = parser
        self._tools = tools
        self._logprobs_of = logprobs
        self._has_sealed_thoughts = has_sealed_thoughts
        self._logprobs: list[Fields] = []  # log-probabilities of the open message
        self._unsent_logprobs: list[Fields] = []
        self._items: list[Fields] = []
        self._text = ""  # text of the open item
        self._is_open = False
        self._input: CustomInput | None = None  # input of the open call of a custom tool
        self._held: _HeldCall | None = None
        self._truncated: set[int] = set()  # indices of calls that were cut off
        self.reasoning_tokens = 0
        self.is_incomplete = False
        self.statistics: Statistics | None = None

    @property
    def output(self) -> list[Fields]:
        """The items of the whole answer."""
        return [item for index, item in enumerate(self._items) if index not in self._truncated]

    def push(self, piece: Piece) -> list[Fields]:
        """The events that a piece gives, perhaps none. The last piece sets `statistics`."""
        found = self._parser.push(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            found = [*found, *self._parser.finish()]
            self.is_incomplete = ending_of(piece)["finish_reason"] == "length"
        new = [] if self._logprobs_of is None else self._logprobs_of(piece)
        if not self._is_in_message:  # what lies between an item and a message belongs to neither
            self._unsent_logprobs.clear()
        self._unsent_logprobs += new
        events = [event for each in found for event in self._events(each)]
        if self._items and all(item["type"] == "reasoning" for item in self._items):
            self.reasoning_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            events += self._closed("incomplete" if self.is_incomplete else "completed")
            self.statistics = piece.statistics
        return events

    def _events(self, event: OutputEvent) -> Iterator[Fields]:
        match event:
            case Content(text=text):
                yield from self._opened({"type": "message", "role": "assistant", "content": []}, "msg")
                yield self._grown(text, logprobs=self._take_logprobs())
            case Reasoning(text=text):
                yield from self._opened({"type": "reasoning", "summary": [], "content": []}, "rs")
                yield self._grown(text)
            case ToolCallStart(id=call_id, name=name):
                yield from self._closed()
                yield from self._call_begun(call_id, name)
            case ToolCallArguments(json_fragment=fragment) if self._is_in_call:
                yield from self._call_grown(fragment)
            case ToolCallEnd() if self._is_in_call:
                yield from self._call_ended()
            case ToolCallTruncated(text=text) if self._is_in_call:
                yield from self._truncated_call(text)

    @property
    def _is_in_message(self) -> bool:
        return not self._items or (self._is_open and self._items[-1]["type"] == "message")

    @property
    def _is_in_call(self) -> bool:
        is_call = self._is_open and self._items[-1]["type"] not in _WITH_PARTS
        return is_call or self._held is not None

    def _call_begun(self, call_id: str, name: str) -> Iterator[Fields]:
        tool = self._tools.of(name) or OfferedTool({"name": name}, "function", name)
        named: Fields = {"call_id": call_id, "name": tool.name}
        if tool.namespace is not None:
            named["namespace"] = tool.namespace
        if tool.type in CLIENT_TOOLS:
            self._held = _HeldCall(CLIENT_TOOLS[tool.type], call_id)
        elif tool.type == "custom":
            self._input = CustomInput()
            yield from self._opened({"type": "custom_tool_call", **named, "input": ""}, "ctc")
        else:
            yield from self._opened({"type": "function_call", **named, "arguments": ""}, "fc")

    def _call_grown(self, fragment: str) -> Iterator[Fields]:
        if self._held is not None:
            self._held.arguments += fragment
        elif self._input is None:
            yield self._grown(fragment)
        elif added := self._input.push(fragment):
            yield self._grown(added)

    def _call_ended(self) -> Iterator[Fields]:
        if self._held is not None:
            held, self._held = self._held, None
            fields = held.tool.fields(json.loads(held.arguments or "{}"))
            if fields is None:
                # An item needs what the arguments lack: the client shows the user what was written.
                yield from self._events(Content(held.arguments))
                return
            item = {"type": held.tool.item_type, "call_id": held.call_id, **fields}
            yield from self._opened(item, held.tool.prefix)
        elif self._input is not None and (rest := self._input.finish()):
            yield self._grown(rest)
        yield from self._closed()

    def _truncated_call(self, text: str) -> Iterator[Fields]:
        """A call of which only a part was written is none, for those who did not read along."""
        if self._held is None:
            self._truncated.add(len(self._items) - 1)
        self._held = None
        yield from self._closed("incomplete")
        yield from self._events(Content(text))

    def _take_logprobs(self) -> list[Fields]:
        """Those of the tokens since the last text of a message."""
        taken, self._unsent_logprobs = self._unsent_logprobs, []
        self._logprobs += taken
        return taken

    @property
    def _place(self) -> Fields:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _opened(self, item: Fields, prefix: str) -> Iterator[Fields]:
        if self._is_open and self._items[-1]["type"] == item["type"]:
            return
        yield from self._closed()
        self._items.append({"id": f"{prefix}_{secrets.token_hex(12)}", **item, "status": "in_progress"})
        self._is_open, self._text, self._logprobs = True, "", []
        place = {"output_index": len(self._items) - 1, "item": dict(self._items[-1])}
        yield {"type": "response.output_item.added", **place}
        if item["type"] in _WITH_PARTS:
            yield {
                "type": "response.content_part.added",
                **self._place,
                "content_index": 0,
                "part": self._part(),
            }

    def _part(self) -> Fields:
        kind = _DELTAS[self._items[-1]["type"]][1]
        more: Fields = {"annotations": [], "logprobs": list(self._logprobs)} if kind == "output_text" else {}
        return {"type": kind, "text": self._text, **more}

    def _grown(self, text: str, **more: Any) -> Fields:
        self._text += text
        kind = self._items[-1]["type"]
        place = {**self._place, "content_index": 0} if kind in _WITH_PARTS else self._place
        return {"type": f"{_DELTAS[kind][0]}.delta", **place, "delta": text, **more}

    def _closed(self, status: str = "completed") -> Iterator[Fields]:
        if not self._is_open:
            return
        self._is_open, self._input = False, None
        item = self._items[-1]
        item["status"] = status
        yield from self._done(item)
        yield {
            "type": "response.output_item.done",
            "output_index": len(self._items) - 1,
            "item": dict(item),
        }

    def _done(self, item: Fields) -> Iterator[Fields]:
        """The events that end what the deltas of an item reported; items that came as a whole have none."""
        if item["type"] not in _DELTAS:
            return
        name, part = _DELTAS[item["type"]]
        if item["type"] in _WITH_PARTS:
            item["content"] = [self._part()]
            place = {**self._place, "content_index": 0}
            more: Fields = {"logprobs": self._logprobs} if part == "output_text" else {}
            if part == "reasoning_text" and self._has_sealed_thoughts:
                item["encrypted_content"] = sealed(self._text)
            yield {"type": f"{name}.done", **place, "text": self._text, **more}
            yield {"type": "response.content_part.done", **place, "part": self._part()}
        else:
            item[part] = self._text
            named = {"name": item["name"]} if part == "arguments" else {}
            yield {"type": f"{name}.done", **self._place, **named, part: self._text}


@dataclass
class _HeldCall:
    """A call whose item needs its complete arguments."""

    tool: ClientTool
    call_id: str
    arguments: str = ""
