"""Answers of models that write control tokens into them, gpt-oss and gemma-4, as text for people.

A thought stands between the tags that other models write. Unit of work: one answer.
"""

from coldstream.engine import LLM
from coldstream.server.output import (
    Content,
    Reasoning,
    ToolCallTruncated,
    marks_control_tokens,
    output_parser,
)

_OPENING, _CLOSING = "<think>\n", "\n</think>\n\n"


class ReadableAnswer:
    """The pieces of one answer, whose control tokens are marked."""

    def __init__(self, template_source: str) -> None:
        self._parser = output_parser(template_source, (), is_thinking=False, prompt_end="<|start|>assistant")
        self._is_thinking = False
        self._content: list[str] = []

    @property
    def content(self) -> str:
        """The answer without its thought, for the conversation."""
        return "".join(self._content)

    def push(self, text: str, *, is_last: bool) -> str:
        """What is to be shown of a piece."""
        events = [*self._parser.push(text), *(self._parser.finish() if is_last else ())]
        shown = []
        for event in events:
            if isinstance(event, Reasoning):
                shown.append(event.text if self._is_thinking else _OPENING + event.text)
                self._is_thinking = True
            elif isinstance(event, Content | ToolCallTruncated):
                shown.append(_CLOSING + event.text if self._is_thinking else event.text)
                self._is_thinking = False
                self._content.append(event.text)
        return "".join(shown)


def readable_answer(llm: LLM) -> ReadableAnswer | None:
    """What reads the answers of a model's chats; None if they are text for people as they are."""
    source = llm.opened.chat_template.source or ""
    marks = marks_control_tokens(source, llm.opened.tokenizer.vocabulary.control_ids)
    return ReadableAnswer(source) if marks else None
