"""What the answer to a chat is made to match, by the fields of the request."""

from typing import Any

import pytest

from coldstream.decoding import Grammar
from coldstream.server.http import ServerSettings
from coldstream.server.http.chat_reading import read_chat
from coldstream.server.http.chat_request import ChatRequest
from coldstream.server.local_client import LocalClient
from coldstream.server.output import MAX_CALLS, forced_calls
from http_serving import WithTemplate
from output_samples import TOOLS


def grammar_of(client: LocalClient, **fields: Any) -> Grammar | None:
    served = WithTemplate(client).model
    messages = [{"role": "user", "content": "go"}]
    body = ChatRequest.model_validate({"messages": messages, "tools": TOOLS, "max_tokens": 4, **fields})
    return read_chat(body, served, ServerSettings()).request.params.grammar


@pytest.mark.parametrize(("given", "is_parallel"), [({}, True), (None, True), (True, True), (False, False)])
def test_several_calls_may_be_demanded_unless_the_request_says_otherwise(
    local_client: LocalClient, given: Any, is_parallel: bool
) -> None:
    fields = {} if given == {} else {"parallel_tool_calls": given}
    source = WithTemplate(local_client).model.template_source or ""
    several, one = (forced_calls(source, TOOLS, most_calls=most) for most in (MAX_CALLS, 1))
    assert several != one
    found = grammar_of(local_client, tool_choice="required", **fields)
    assert found == (several if is_parallel else one)


def test_a_named_tool_is_called_once(local_client: LocalClient) -> None:
    source = WithTemplate(local_client).model.template_source or ""
    choice = {"type": "function", "function": {"name": "list_files"}}
    assert grammar_of(local_client, tool_choice=choice) == forced_calls(source, TOOLS[1:])
    assert grammar_of(local_client, tool_choice="auto") is None
    assert grammar_of(local_client) is None


def test_a_schema_is_obeyed_to_the_letter_only_where_it_is_strict(local_client: LocalClient) -> None:
    schema = {"name": "a", "schema": {"type": "object"}}
    for strict in (True, False, None):
        form = {"type": "json_schema", "json_schema": schema | {"strict": strict}}
        found = grammar_of(local_client, tools=[], response_format=form)
        assert found is not None
        assert found.is_lenient == (strict is not True)
    assert grammar_of(local_client, tools=[], response_format={"type": "text"}) is None
