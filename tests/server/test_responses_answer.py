"""Items of an answer, made of its pieces, and their log-probabilities."""

from typing import Any

from openai import AsyncOpenAI

from coldstream.engine.request import Piece, Statistics
from coldstream.server.http.responses_answer import ResponseItems
from coldstream.server.http.responses_tools import FlatTool, OfferedTools
from coldstream.server.output import output_parser
from output_samples import XML_TEMPLATE, rendered

STATISTICS = Statistics(5, 2, 9, 0.1, 0.1, "avx2", 1, 0)
GREEDY: Any = {
    "model": "demo",
    "instructions": "Write Python.",
    "input": "import os\nimport sys\n",
    "max_output_tokens": 24,
    "temperature": 0,
}
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
    added = [event["part"] for event in events if event["type"] == "response.content_part.added"]
    assert added[1] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    reported = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert tokens_of([each for logprobs in reported for each in logprobs]) == ["Yes", ", ", "so"]
    (part,) = output[1]["content"]
    assert tokens_of(part["logprobs"]) == ["Yes", ", ", "so"]


def test_a_text_that_was_held_back_keeps_its_log_probabilities() -> None:
    output, _ = items_of("1 ", "<", " 2", " <tool", "s")
    (part,) = output[0]["content"]
    assert part["text"] == "1 < 2 <tools"
    assert tokens_of(part["logprobs"]) == ["1 ", "<", " 2", " <tool", "s"]


async def test_log_probabilities_are_those_of_the_message(openai: AsyncOpenAI) -> None:
    asked: Any = {**GREEDY, "max_output_tokens": 8}
    wanted: Any = {**asked, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await openai.responses.create(**wanted)
    (item,) = response.output
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(each.token for each in part.logprobs) == part.text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    events = [event async for event in await openai.responses.create(**wanted, stream=True)]
    reported = [each for e in events if e.type == "response.output_text.delta" for each in e.logprobs]
    done = next(e for e in events if e.type == "response.output_text.done")
    assert [each.token for each in reported] == [each.token for each in part.logprobs]
    assert [each.token for each in done.logprobs] == [each.token for each in part.logprobs]
    (plain,) = (await openai.responses.create(**asked)).output
    assert plain.type == "message"
    assert plain.content[0].to_dict()["logprobs"] == []


async def test_log_probabilities_of_thoughts_and_calls_are_not_reported(thinking: AsyncOpenAI) -> None:
    asked: Any = {**GREEDY, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    response = await thinking.responses.create(**asked)
    assert [item.type for item in response.output] == ["reasoning"]
    answer = await thinking.responses.create(
        **{**asked, "max_output_tokens": 8}, reasoning={"effort": "none"}
    )
    (item,) = answer.output
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert "".join(each.token for each in part.logprobs or ()) == part.text
