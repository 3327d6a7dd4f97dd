"""One answer as blocks of Anthropic's messages API: whole, and as the events that build it."""

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

from coldstream.engine.request import Piece, Statistics
from coldstream.server.http.accounts import ending_of
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

_THOUGHT: Final = {"type": "thinking", "thinking": "", "signature": ""}
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageBlocks:
    """The blocks of one answer, from its first piece to its last.

    is_thinking: whether the prompt ends inside a thought. Then there is a block of it even if it is empty, as
    clients that asked for thoughts send it back with its signature.
    """

    def __init__(self, parser: AnswerParser, *, is_thinking: bool = False) -> None:
        self._parser = parser
        self._blocks: list[Fields] = []
        self._is_open = False  # whether the last block may grow
        self._owes_thought = is_thinking
        self.ending: Fields = {}  # stop_reason and stop_sequence
        self.statistics: Statistics | None = None

    def push(self, piece: Piece) -> list[Fields]:
        """The events that a piece gives, perhaps none. The last piece sets `ending` and `statistics`."""
        found = self._parser.push(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            found = [*found, *self._parser.finish()]
        events = list(self._owed())
        events += [event for each in found for event in self._events(each)]
        if piece.finish_reason is not None:
            events += self._closed()
            self.statistics, self.ending = piece.statistics, self._ending(piece)
        return events

    @property
    def content(self) -> list[Fields]:
        """The blocks of the whole answer."""
        return [_whole(block) for block in self._blocks if block["type"] != "truncated"]

    def _owed(self) -> Iterator[Fields]:
        if self._owes_thought:
            self._owes_thought = False
            yield from self._opened("thinking", dict(_THOUGHT))

    def _events(self, event: OutputEvent) -> Iterator[Fields]:
        match event:
            case Content(text=text):
                yield from self._opened("text", {"type": "text", "text": ""})
                yield self._grown("text", text, "text_delta", "text")
            case Reasoning(text=text):
                yield from self._opened("thinking", dict(_THOUGHT))
                yield self._grown("thinking", text, "thinking_delta", "thinking")
            case ToolCallStart(id=call_id, name=name):
                yield from self._closed()
                own_id = f"toolu_{call_id.removeprefix('call_')}"
                yield from self._opened(
                    "tool_use", {"type": "tool_use", "id": own_id, "name": name, "input": {}}
                )
                self._blocks[-1]["json"] = ""
            case ToolCallArguments(json_fragment=fragment) if self._is_in_call:
                yield self._grown("json", fragment, "input_json_delta", "partial_json")
            case ToolCallEnd() if self._is_in_call:
                yield from self._closed()
            case ToolCallTruncated(text=text) if self._is_in_call:
                # A call of which only a part was written is none, for those who did not read along.
                self._blocks[-1]["type"] = "truncated"
                yield from self._closed()
                yield from self._events(Content(text))

    @property
    def _is_in_call(self) -> bool:
        return self._is_open and self._blocks[-1]["type"] == "tool_use"

    def _opened(self, kind: str, block: Fields) -> Iterator[Fields]:
        if self._is_open and self._blocks[-1]["type"] == kind:
            return
        yield from self._closed()
        self._blocks.append(dict(block))
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _grown(self, field: str, text: str, kind: str, name: str) -> Fields:
        self._blocks[-1][field] += text
        return {
            "type": "content_block_delta",
            "index": len(self._blocks) - 1,
            "delta": {"type": kind, name: text},
        }

    def _closed(self) -> Iterator[Fields]:
        if self._is_open:
            if self._blocks[-1]["type"] == "thinking":
                signature = signature_of(self._blocks[-1]["thinking"])
                yield self._grown("signature", signature, "signature_delta", "signature")
            self._is_open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _ending(self, piece: Piece) -> Fields:
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        ending = ending_of(piece, has_calls=has_calls)
        reason, stop = _STOP_REASONS[ending["finish_reason"]], ending["stop_reason"]
        if reason == "end_turn" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": reason, "stop_sequence": None}


def _whole(block: Fields) -> Fields:
    if block["type"] != "tool_use":
        return block
    return {
        **{name: block[name] for name in ("type", "id", "name")},
        "input": json.loads(block["json"] or "{}"),
    }


def signature_of(thought: str) -> str:
    """The signature of a thinking block, which clients send back with it: the number of this form, and the
    SHA-256 of the thought in base64. It says that the block is whole, and is not checked when it comes back.
    """
    digest = hashlib.sha256(thought.encode("utf-8", "surrogatepass")).digest()
    return f"1:{base64.b64encode(digest).decode()}"


def usage_of(statistics: Statistics) -> Fields:
    """Anthropic's `usage`, in which cached tokens are no input tokens."""
    return {
        "input_tokens": statistics.prompt_tokens - statistics.reused_tokens,
        "cache_read_input_tokens": statistics.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": statistics.generated_tokens,
    }
