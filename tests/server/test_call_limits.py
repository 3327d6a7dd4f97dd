"""How many calls of an answer are reported, in each of the three interfaces."""

from typing import Any

import pytest

from coldstream.engine.request import Piece, Statistics
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.server.http.anthropic_answer import MessageBlocks
from coldstream.server.http.chat_answer import ChatAnswer
from coldstream.server.http.responses_answer import ResponseItems
from coldstream.server.http.responses_tools import OfferedTools
from coldstream.server.local_client import LocalClient
from coldstream.server.output import output_parser
from output_samples import HERMES_TEMPLATE, TOOLS, rendered

TEXT = "\n".join(rendered("hermes", "write_file", {"path": f"{i}", "content": ""}) for i in range(3))


def pushed(answer: Any) -> Any:
    for character in TEXT:
        answer.push(Piece(character))
    answer.push(Piece("", finish_reason="stop", statistics=Statistics(1, 0, 1, 0.1, 0.1, "none", 1, 0)))
    return answer


@pytest.fixture(scope="module")
def tokenizer(local_client: LocalClient) -> Tokenizer:
    return local_client.model.tokenizer


@pytest.mark.parametrize("most", [None, 1, 2, 3])
def test_calls_beyond_the_most_are_left_out(tokenizer: Tokenizer, most: int | None) -> None:
    def parser() -> Any:
        return output_parser(HERMES_TEMPLATE, TOOLS, is_thinking=False, max_calls=most)

    chat = pushed(ChatAnswer(parser(), tokenizer, None))
    blocks = pushed(MessageBlocks(parser()))
    items = pushed(ResponseItems(parser(), OfferedTools([])))
    count = 3 if most is None else most
    assert len(chat.message["tool_calls"]) == count
    assert [block["input"]["path"] for block in blocks.content if block["type"] == "tool_use"] == [
        str(i) for i in range(count)
    ]
    assert len([item for item in items.output if item["type"] == "function_call"]) == count
