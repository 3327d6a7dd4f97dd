"""A reported answer, sent back as history, is the text that the model wrote: its prefix is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coldstream.gguf.chat_template import ChatTemplate
from coldstream.server.output import output_parser, prompt_opens_thought
from output_samples import TOOLS, calls_of, content_of, reasoning_of, rendered

TEMPLATE = Path(__file__).parent.parent.joinpath("gguf", "chatml.jinja").read_text()
USER = {"role": "user", "content": "Write it."}
END = "<|im_end|>\n"


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    with ChatTemplate(TEMPLATE, ["<|im_start|>", "<|im_end|>"], {}) as template:
        yield template


def message_of(text: str, prompt: str, source: str = TEMPLATE) -> dict[str, Any]:
    """The message that a client has of an answer, and sends back."""
    parser = output_parser(source, TOOLS, is_thinking=prompt_opens_thought(prompt))
    events = [event for character in text for event in parser.push(character)] + parser.finish()
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls_of(events)
    ]
    message = {"role": "assistant", "content": content_of(events), "reasoning_content": reasoning_of(events)}
    return {**message, "tool_calls": calls} if calls else message


WRITE = rendered("xml", "write_file", {"path": "/a b", "content": "\n\nx\t\n", "mode": 5, "owner": None})


@pytest.mark.parametrize("is_thinking", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        "Done.",
        f"I will.\n\n{WRITE}",
        WRITE,
        f"{WRITE}\n{rendered('xml', 'list_files', {})}",
        f"Both <b>.\n\n{WRITE}\n{WRITE}",
    ],
)
def test_an_answer_echoed_as_history_is_the_same_text(
    template: ChatTemplate, answer: str, *, is_thinking: bool
) -> None:
    """Reasoning, content, values and the order of parameters."""
    settings: Any = {"tools": TOOLS, "enable_thinking": is_thinking}
    prompt = template.render([USER], **settings).text
    text = f"Hm.\n\n  Well.\n</think>\n\n{answer}" if is_thinking else answer
    message = message_of(text, prompt)
    again = template.render([USER, message], add_generation_prompt=False, **settings).text
    assert again == f"{prompt}{text}{END}"


# --- keys and values in tags, as Laguna writes them -------------------------------------------------------

ARGS_SOURCE = Path(__file__).parent.parent.joinpath("gguf", "args.jinja").read_text()
ARGS_WRITE = rendered(
    "lines", "write_file", {"path": "/a b", "content": "\n\nx\t\n ", "mode": 5, "owner": None}
)


@pytest.fixture(scope="module")
def args_template() -> Iterator[ChatTemplate]:
    with ChatTemplate(ARGS_SOURCE, ["〈|EOS|〉", "</assistant>"], {}) as template:
        yield template


@pytest.mark.parametrize("is_thinking", [True, False])
@pytest.mark.parametrize("answer", ["Done.\n", f"I will.\n{ARGS_WRITE}\n", f"{ARGS_WRITE}\n" * 2])
def test_an_answer_with_keys_and_values_echoed_as_history_is_the_same_text(
    args_template: ChatTemplate, answer: str, *, is_thinking: bool
) -> None:
    settings: Any = {"tools": TOOLS, "enable_thinking": is_thinking}
    prompt = args_template.render([USER], **settings).text
    text = f"\nHm.\n\n  Well.\n</think>\n{answer}" if is_thinking else f"\n{answer}"
    message = message_of(text, prompt, ARGS_SOURCE)
    again = args_template.render([USER, message], add_generation_prompt=False, **settings).text
    assert again == f"{prompt}{text}</assistant>\n"
