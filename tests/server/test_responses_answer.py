"""Items of an answer, made of its pieces."""

from typing import Any

from coldstream.engine.request import Piece, Statistics
from coldstream.server.http.responses_answer import ResponseItems
from coldstream.server.http.responses_tools import FlatTool, OfferedTools
from coldstream.server.output import output_parser
from output_samples import XML_TEMPLATE, rendered

STATISTICS = Statistics(5, 2, 9, 0.1, 0.1, "avx2", 1, 0)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def items_of(*texts: str, is_thinking: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Items and events of an answer that comes in these pieces; each is one token."""
    tools = OfferedTools([FlatTool.model_validate(TOOL)])
    parser = output_parser(XML_TEMPLATE, tools.as_functions(), is_thinking=is_thinking)
    items = ResponseItems(parser, tools, logprobs=lambda piece: [{"token": piece.text}])
    events = [event for text in texts for event in items.push(Piece(text, (1,)))]
    events += items.push(Piece("", finish_reason="stop", statistics=STATISTICS))
    return items.output, events


def tokens_of(logprobs: list[dict[str, Any]]) -> list[str]:
    return [each["token"] for each in logprobs if each["token"]]


def test_log_probabilities_are_of_the_texts_of_messages() -> None:
    call = rendered("xml", "look", {})
    texts = ["plan", " it", "</think>", "\n\n", "Yes", ", ", "so", "\n\n", call[:9], call[9:]]
    output, events = items_of(*texts, is_thinking=True)
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    added = next(event["part"] for event in events if event["type"] == "response.content_part.added")
    assert added["text"] == ""
    told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert tokens_of([each for logprobs in told for each in logprobs]) == ["Yes", ", ", "so"]
    (part,) = output[1]["content"]
    assert tokens_of(part["logprobs"]) == ["Yes", ", ", "so"]


def test_a_text_that_was_held_back_keeps_its_log_probabilities() -> None:
    output, _ = items_of("1 ", "<", " 2", " <tool", "s")
    (part,) = output[0]["content"]
    assert part["text"] == "1 < 2 <tools"
    assert tokens_of(part["logprobs"]) == ["1 ", "<", " 2", " <tool", "s"]
