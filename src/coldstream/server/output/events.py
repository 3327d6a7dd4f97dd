"""What an answer's text turns out to be, in the order in which it is emitted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the thought before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call of the tool `name` begins; `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of a call's arguments. All pieces up to its `ToolCallEnd`, joined, are one JSON object."""

    index: int
    json_fragment: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


@dataclass(frozen=True)
class ToolCallTruncated:
    """The answer ended inside a call that had begun: it is none. `text` is what was written of it."""

    index: int
    text: str


OutputEvent = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallTruncated
