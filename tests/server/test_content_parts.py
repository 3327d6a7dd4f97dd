"""Parts of contents as text: the types of both APIs, read or replaced, and never an error."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from anthropic.types import ContentBlockParam, ToolResultBlockParam
from anthropic.types.beta import BetaContentBlockParam, BetaToolResultBlockParam
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionContentPartParam
from openai.types.chat.chat_completion_content_part_refusal_param import (
    ChatCompletionContentPartRefusalParam,
)
from openai.types.responses import ResponseInputContentParam
from typing_extensions import get_type_hints, is_typeddict

from coldstream.server.http.content_parts import ContentPart, is_text_part, text_of_content, text_of_part
from coldstream.server.http.problems import ProblemError

UNKNOWN = "content of type"
# What `/v1/messages` reads itself, as messages of their own.
OWN_MESSAGES = {"tool_use", "tool_result"}
LEFT_OUT = ": this model reads text only]"


def kinds_of(union: Any) -> Iterator[str]:
    """The types of all dictionaries in a union of an official client's parameters."""
    if is_typeddict(union):
        yield from get_args(get_type_hints(union)["type"])
    for member in get_args(union):
        yield from kinds_of(member)


def contents_of(block: Any) -> Any:
    return get_type_hints(block)["content"]


KINDS = {
    kind
    for union in (
        ContentBlockParam,
        BetaContentBlockParam,
        contents_of(ToolResultBlockParam),
        contents_of(BetaToolResultBlockParam),
        ChatCompletionContentPartParam,
        ChatCompletionContentPartRefusalParam,
        ResponseInputContentParam,
    )
    for kind in kinds_of(union)
}


def test_the_clients_types_are_found() -> None:
    assert {"text", "image", "document", "tool_reference", "image_url", "input_audio", "input_file"} <= KINDS
    assert {"refusal", "web_search_tool_result", "mcp_tool_use", "container_upload"} <= KINDS


@pytest.mark.parametrize("kind", sorted(KINDS - OWN_MESSAGES))
def test_every_documented_type_has_words_of_its_own(kind: str) -> None:
    assert UNKNOWN not in text_of_part({"type": kind, "text": "x"}, "content")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": " a\n"}, " a\n"),
        ({"type": "output_text", "text": "a", "annotations": []}, "a"),
        ({"type": "refusal", "refusal": "I will not."}, "I will not."),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            f"[image left out{LEFT_OUT}",
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            f"[image image/png left out{LEFT_OUT}",
        ),
        (
            {"type": "input_audio", "input_audio": {"format": "wav", "data": "AAAA"}},
            f"[audio wav left out{LEFT_OUT}",
        ),
        (
            {"type": "file", "file": {"filename": "a b.pdf", "file_data": "AAAA"}},
            f"[file a b.pdf left out{LEFT_OUT}",
        ),
        ({"type": "input_file", "file_id": "file_1"}, f"[file file_1 left out{LEFT_OUT}"),
        (
            {
                "type": "document",
                "title": "Notes",
                "source": {"type": "text", "media_type": "text/plain", "data": "It rains."},
            },
            "[document Notes]\nIt rains.",
        ),
        (
            {
                "type": "document",
                "source": {
                    "type": "content",
                    "content": [{"type": "text", "text": "It rains."}, {"type": "image", "source": {}}],
                },
            },
            f"[document]\nIt rains.\n[image left out{LEFT_OUT}",
        ),
        (
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
            },
            f"[document application/pdf left out{LEFT_OUT}",
        ),
        (
            {
                "type": "search_result",
                "title": "Rain",
                "source": "http://rain",
                "content": [{"type": "text", "text": "It rains."}],
            },
            "[search result Rain http://rain]\nIt rains.",
        ),
        ({"type": "tool_reference", "tool_name": "TaskStop"}, "[tool TaskStop can be called]"),
        (
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "ä"}},
            '[called web_search with {"query": "ä"}]',
        ),
        (
            {"type": "mcp_tool_use", "id": "m", "name": "read", "server_name": "files", "input": {}},
            "[called files.read with {}]",
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [
                    {"type": "web_search_result", "title": "Rain", "url": "http://r", "page_age": None}
                ],
            },
            "[result of web search]\nRain\nhttp://r",
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
            },
            "[result of web search]\nunavailable",
        ),
        (
            {
                "type": "bash_code_execution_tool_result",
                "tool_use_id": "s",
                "content": {
                    "type": "bash_code_execution_result",
                    "stdout": "5\n",
                    "stderr": "",
                    "return_code": 0,
                    "content": [],
                },
            },
            "[result of bash code execution]\n5\n",
        ),
        (
            {
                "type": "tool_search_tool_result",
                "tool_use_id": "s",
                "content": {
                    "type": "tool_search_tool_search_result",
                    "tool_references": [{"type": "tool_reference", "tool_name": "f"}],
                },
            },
            "[result of tool search]\n[tool f can be called]",
        ),
        (
            {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "done"}]},
            "[result of mcp]\ndone",
        ),
        ({"type": "redacted_thinking", "data": "x"}, ""),
        ({"type": "compaction", "content": "They talked of rain."}, "They talked of rain."),
        ({"type": "compaction", "content": None}, ""),
        (
            {"type": "browser_state", "tabs": [{"url": "http://r", "title": "R", "active": True}]},
            "[browser: active tab http://r]",
        ),
        ({"type": "hologram", "data": "AAAA"}, f"[content of type hologram left out{LEFT_OUT}"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_parts_as_text(part: dict[str, Any], expected: str) -> None:
    assert text_of_part(part, "content") == expected
    assert text_of_content([ContentPart.model_validate(part)], "content") == expected


def test_texts_are_joined_and_placeholders_have_lines_of_their_own() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://a"}}
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    placeholder = f"[image left out{LEFT_OUT}"
    assert text_of_content([*texts, image, *texts], "content") == f"ab\n{placeholder}\nab"
    assert text_of_content([image, image], "content") == f"{placeholder}\n{placeholder}"
    assert text_of_content(texts, "content", "\n") == "a\nb"
    assert text_of_content("a", "content") == "a"
    assert text_of_content(None, "content") == ""


@pytest.mark.parametrize("part", [{}, {"type": 1}, {"text": "a"}, "a", None, {"type": "text"}])
def test_a_part_without_a_type_or_a_text_is_named(part: Any) -> None:
    with pytest.raises(ProblemError, match=r"^messages\[3\]\.content\[1\]") as error:
        text_of_content([{"type": "text", "text": "a"}, part], "messages[3].content")
    assert error.value.problem.status == 400


def test_deep_nesting_is_refused() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ProblemError, match=r"content\[0\]: it is nested too deeply"):
        text_of_content([{"type": "mcp_tool_result", "content": nested}], "content")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("source", "content", "file", "tool", "tools", "tabs", "title", "name", "input", "data", "refusal")


@given(
    kind=st.sampled_from(sorted(KINDS)),
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    source=st.fixed_dictionaries({"type": st.sampled_from(["text", "content", "url"]), "content": VALUES}),
)
def test_fields_of_any_shape_give_a_text(kind: str, fields: dict[str, Any], source: Any) -> None:
    part = {"source": source, **fields, "type": kind, "text": "a"}
    text = text_of_part(part, "content")
    assert isinstance(text, str)
    assert is_text_part(part) == (text == "a" and kind.endswith("text"))
