"""Parts of messages and blocks of content as text, for a model that reads text only.

What holds text is read. All else becomes a placeholder, a short text in brackets that says what was left out,
so that a conversation with a picture in it can go on. The same part always gives the same text, which keeps
prefixes of prompts. Knows the types of OpenAI's chats and responses and those of Anthropic's messages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import ConfigDict

from coldstream.server.http.fields import Body, Name, Text
from coldstream.server.http.problems import refused

Fields = Mapping[str, Any]

_MAX_NAME_CHARS: Final = 200
_TEXTS: Final = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text"})


class ContentPart(Body):
    """A part of a message of any type; which other fields there are depends on the type."""

    model_config = ConfigDict(extra="allow")

    type: Name
    text: Text | None = None


def text_of_content(
    content: str | Sequence[ContentPart | Fields] | None, name: str, separator: str = ""
) -> str:
    """A content as one text: `separator` lies between texts, and a placeholder is on a line of its own.

    `name` is the content's in errors. Raises ProblemError for a part that is no object with a type, or a text
    without text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    text, was_text = "", True
    for index, part in enumerate(content):
        fields = part.model_dump() if isinstance(part, ContentPart) else part
        piece, is_text = text_of_part(fields, f"{name}[{index}]"), is_text_part(fields)
        between = separator if is_text and was_text else "\n"
        text += (between if text and piece and not text.endswith("\n") else "") + piece
        was_text = is_text
    return text


def is_text_part(part: Fields) -> bool:
    """Whether a part is plain text."""
    return part.get("type") in _TEXTS


def text_of_part(part: Fields, name: str) -> str:
    """A part's text, or its placeholder. Raises as `text_of_content`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise refused(f"{name}: a part of a content is an object with a type", name)
    if kind in _TEXTS:
        if not isinstance(part.get("text"), str):
            raise refused(f"{name}.text: a part of type {kind} needs a text", f"{name}.text")
        return str(part["text"])
    try:
        return _read(part, kind)
    except RecursionError:
        raise refused(f"{name}: it is nested too deeply", name) from None


def _read(part: Fields, kind: str) -> str:
    reader = _READERS.get(kind)
    if reader is not None:
        return reader(part)
    if kind.endswith("_tool_result"):
        return _tool_result(part)
    return _left_out(f"content of type {_short(kind)}")


def called(name: object, arguments: object) -> str:
    """The placeholder of a call that another server has made."""
    return f"[called {_short(name)} with {json.dumps(arguments, ensure_ascii=False)}]"


def _left_out(what: str) -> str:
    return f"[{what} left out: this model reads text only]"


def _short(value: object) -> str:
    """A name as a client gave it, on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[: _MAX_NAME_CHARS - 1]}…"


def _named(what: str, *names: object) -> str:
    """`what` with the first name that is one."""
    given = next((name for name in names if isinstance(name, str) and name.strip()), None)
    return what if given is None else f"{what} {_short(given)}"


def _inner(part: Fields, field: str) -> Fields:
    value = part.get(field)
    return value if isinstance(value, Mapping) else {}


def _media(what: str) -> Callable[[Fields], str]:
    """Of pictures, sounds and films, which may say their format."""

    def read(part: Fields) -> str:
        return _left_out(_named(what, part.get("title"), _inner(part, "source").get("media_type")))

    return read


def _audio(part: Fields) -> str:
    return _left_out(_named("audio", _inner(part, "input_audio").get("format")))


def _file(part: Fields) -> str:
    """A file of OpenAI's chats, or of responses, which have its fields in the part itself."""
    file = {**part, **_inner(part, "file")}
    return _left_out(_named("file", file.get("filename"), file.get("file_id"), file.get("file_url")))


def _document(part: Fields) -> str:
    source = _inner(part, "source")
    heading = _named("document", part.get("title"))
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return f"[{heading}]\n{source['data']}"
    if source.get("type") == "content":
        return f"[{heading}]\n{_readable(source.get('content'))}"
    names = (part.get("title"), source.get("url"), source.get("file_id"), source.get("media_type"))
    return _left_out(_named("document", *names))


def _search_result(part: Fields) -> str:
    heading = " ".join(_short(part[name]) for name in ("title", "source") if isinstance(part.get(name), str))
    return f"[search result {heading}]\n{_readable(part.get('content'))}"


def _tool_reference(part: Fields) -> str:
    return f"[tool {_short(part.get('tool_name'))} can be called]"


def _refusal(part: Fields) -> str:
    return part["refusal"] if isinstance(part.get("refusal"), str) else ""


def _call(part: Fields) -> str:
    name = part.get("name")
    server = part.get("server_name")
    return called(f"{server}.{name}" if isinstance(server, str) else name, part.get("input") or {})


def _tool_result(part: Fields) -> str:
    """What a tool gave that another server ran: its texts, or the code of its error."""
    kind = _short(part["type"]).removesuffix("_tool_result").replace("_", " ")
    return f"[result of {kind}]\n{_readable(part.get('content'))}"


def _compaction(part: Fields) -> str:
    """A summary in the place of what came before, empty if it failed."""
    return _readable(part.get("content"))


def _tool_change(what: str) -> Callable[[Fields], str]:
    def read(part: Fields) -> str:
        tool = _inner(part, "tool")
        return f"[{_named('tool', tool.get('name'), tool.get('tool_name'))} {what}]"

    return read


def _mcp_tool_listing(part: Fields) -> str:
    given = part.get("tools")
    tools = given if isinstance(given, list) else []
    names = [_short(tool["name"]) for tool in tools if isinstance(tool, Mapping) and "name" in tool]
    return f"[{_named('tools of', part.get('mcp_server_name'))}: {', '.join(names)}]"


def _browser_state(part: Fields) -> str:
    given = part.get("tabs")
    tabs = [tab for tab in given if isinstance(tab, Mapping)] if isinstance(given, list) else []
    names = [_named("active tab" if tab.get("active") is True else "tab", tab.get("url")) for tab in tabs]
    return f"[browser: {'; '.join(names) or 'no tabs'}]"


def _nothing(part: Fields) -> str:
    """What is addressed to the server that wrote it."""
    return ""


def _readable(content: object) -> str:
    """The texts in a value of any shape, one a line, and placeholders of parts that are none."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return _readable_object(content)
    if isinstance(content, list):
        return "\n".join(filter(None, map(_readable, content)))
    return ""


def _readable_object(content: Fields) -> str:
    kind = content.get("type")
    if kind in _TEXTS and isinstance(content.get("text"), str):
        return str(content["text"])
    if isinstance(kind, str) and kind in _READERS:
        return _READERS[kind](content)
    if not any(name in content for name in (*_RESULT_TEXTS, *_RESULT_PARTS)):
        return _left_out(f"content of type {_short(kind)}")
    lines = [str(content[name]) for name in _RESULT_TEXTS if isinstance(content.get(name), str)]
    nested = [_readable(content.get(name)) for name in _RESULT_PARTS]
    return "\n".join(filter(None, [*lines, *nested]))


# What results of tools hold as text, and what holds such results.
_RESULT_TEXTS: Final = ("error_code", "title", "url", "page_age", "stdout", "stderr", "text")
_RESULT_PARTS: Final = ("content", "tool_references", "lines")

_READERS: Final[Mapping[str, Callable[[Fields], str]]] = {
    # OpenAI's chats and responses
    "image_url": _media("image"),
    "input_image": _media("image"),
    "input_audio": _audio,
    "output_audio": _audio,  # of earlier answers
    "video_url": _media("video"),
    "file": _file,
    "input_file": _file,
    "refusal": _refusal,
    # Anthropic's messages
    "image": _media("image"),
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
    "thinking": _nothing,
    "redacted_thinking": _nothing,
    "server_tool_use": _call,
    "mcp_tool_use": _call,
    "container_upload": _file,
    "compaction": _compaction,
    "tool_addition": _tool_change("can be called"),
    "tool_removal": _tool_change("can no longer be called"),
    "mcp_tool_listing": _mcp_tool_listing,
    "browser_state": _browser_state,
    "fallback": _nothing,
}
