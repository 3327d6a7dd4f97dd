"""One answer as items of OpenAI's responses API: whole, and as the events that build it."""

import secrets
from collections.abc import Iterator
from typing import Any, Final

from coldstream.engine.request import Piece, Statistics
from coldstream.server.http.accounts import ending_of
from coldstream.server.output import (
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)

Fields = dict[str, Any]

# By the type of an item: what its deltas are called, and the type of its only part.
_DELTAS: Final = {
    "message": ("response.output_text", "output_text"),
    "reasoning": ("response.reasoning_text", "reasoning_text"),
    "function_call": ("response.function_call_arguments", ""),
}


class ResponseItems:
    """The items of one answer, from its first piece to its last. max_calls: as of `ChatAnswer`."""

    def __init__(self, parser: OutputParser, max_calls: int | None) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._items: list[Fields] = []
        self._text = ""  # of the open item
        self._is_open = False
        self._cut: set[int] = set()  # indices of calls that were cut off
        self.reasoning_tokens = 0
        self.is_incomplete = False
        self.statistics: Statistics | None = None

    @property
    def output(self) -> list[Fields]:
        """The items of the whole answer."""
        return [item for index, item in enumerate(self._items) if index not in self._cut]

    def push(self, piece: Piece) -> list[Fields]:
        """The events that a piece gives, perhaps none. The last piece sets `statistics`."""
        found = self._parser.push(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            found = [*found, *self._parser.finish()]
            self.is_incomplete = ending_of(piece)["finish_reason"] == "length"
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
                yield self._grown(text, logprobs=[])
            case Reasoning(text=text):
                yield from self._opened({"type": "reasoning", "summary": [], "content": []}, "rs")
                yield self._grown(text)
            case ToolCallStart(index=index) if self._max_calls is not None and index >= self._max_calls:
                return
            case ToolCallStart(id=call_id, name=name):
                yield from self._closed()
                call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                yield from self._opened(call, "fc")
            case ToolCallArguments(json_fragment=fragment) if self._is_in_call:
                yield self._grown(fragment)
            case ToolCallEnd() if self._is_in_call:
                yield from self._closed()
            case ToolCallCut(text=text) if self._is_in_call:
                # A call of which only a part was written is none, for those who did not read along.
                self._cut.add(len(self._items) - 1)
                yield from self._closed("incomplete")
                yield from self._events(Content(text))

    @property
    def _is_in_call(self) -> bool:
        return self._is_open and self._items[-1]["type"] == "function_call"

    @property
    def _place(self) -> Fields:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _opened(self, item: Fields, prefix: str) -> Iterator[Fields]:
        if self._is_open and self._items[-1]["type"] == item["type"]:
            return
        yield from self._closed()
        self._items.append({"id": f"{prefix}_{secrets.token_hex(12)}", **item, "status": "in_progress"})
        self._is_open, self._text = True, ""
        place = {"output_index": len(self._items) - 1, "item": dict(self._items[-1])}
        yield {"type": "response.output_item.added", **place}
        if item["type"] != "function_call":
            yield {
                "type": "response.content_part.added",
                **self._place,
                "content_index": 0,
                "part": self._part(),
            }

    def _part(self) -> Fields:
        kind = _DELTAS[self._items[-1]["type"]][1]
        more: Fields = {"annotations": []} if kind == "output_text" else {}
        return {"type": kind, "text": self._text, **more}

    def _grown(self, text: str, **more: Any) -> Fields:
        self._text += text
        name, part = _DELTAS[self._items[-1]["type"]]
        place = {**self._place, "content_index": 0} if part else self._place
        return {"type": f"{name}.delta", **place, "delta": text, **more}

    def _closed(self, status: str = "completed") -> Iterator[Fields]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        name, part = _DELTAS[item["type"]]
        item["status"] = status
        if part:
            item["content"] = [self._part()]
            place = {**self._place, "content_index": 0}
            more: Fields = {"logprobs": []} if part == "output_text" else {}
            yield {"type": f"{name}.done", **place, "text": self._text, **more}
            yield {"type": "response.content_part.done", **place, "part": self._part()}
        else:
            item["arguments"] = self._text
            yield {"type": f"{name}.done", **self._place, "name": item["name"], "arguments": self._text}
        yield {
            "type": "response.output_item.done",
            "output_index": len(self._items) - 1,
            "item": dict(item),
        }
