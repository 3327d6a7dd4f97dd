"""The text of answers: reasoning, content and calls of tools, distinguished while they come. Knows no HTTP.

Which format a model writes its calls in is read off its chat template, which shows it to the model.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from coldstream.decoding import Grammar, Thought
from coldstream.engine.json_schema import LARK
from coldstream.errors import InvalidRequestError
from coldstream.server.output import gemma_calls, harmony
from coldstream.server.output.arg_calls import ArgCalls
from coldstream.server.output.call_format import MAX_CALLS, CallFormat
from coldstream.server.output.control_text import kept_plain
from coldstream.server.output.events import (
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallTruncated,
)
from coldstream.server.output.gemma_calls import GemmaCalls
from coldstream.server.output.harmony import HarmonyParser, harmony_answer, harmony_call
from coldstream.server.output.hermes_calls import HermesCalls
from coldstream.server.output.parser import THINK, THINK_END, OutputParser, ThoughtTags
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.xml_calls import XmlCalls

__all__ = [
    "LARK",
    "MAX_CALLS",
    "AnswerParser",
    "Content",
    "OutputEvent",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolCallTruncated",
    "call_format",
    "constrained_answer",
    "forced_calls",
    "marks_control_tokens",
    "output_parser",
    "prompt_opens_thought",
    "thought_after",
    "writes_harmony",
]

AnswerParser = OutputParser | HarmonyParser


# In the source of a template, where line breaks and quotes may be escaped.
_ARG_LINES: Final = re.compile(r"</arg_key>(?:\\n|\n)")
_HERMES_EXAMPLE: Final = re.compile(r'<tool_call>(?:\\n|\s)*\{\s*\\?"name\\?"')
_CLOSING_TEXT: Final = re.compile(rf"""(['"])((?:\\n|\n)+{THINK_END}(?:\\n|\n)*)\1""")
_BARE_CLOSING: Final = re.compile(rf"""[+~]\s*(['"]){THINK_END}\1""")  # behind a thought that is written
# Tags that some files have as control tokens and others as text.
_PLAIN_TAGS: Final = kept_plain(
    *(THINK, THINK_END, "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def writes_harmony(template_source: str) -> bool:
    """Whether the model with this chat template answers in messages on channels: gpt-oss."""
    return all(token in template_source for token in (harmony.START, harmony.CHANNEL, harmony.MESSAGE))


def _writes_gemma(template_source: str) -> bool:
    return gemma_calls.OPEN in template_source and gemma_calls.THOUGHT in template_source


def marks_control_tokens(template_source: str, control_tokens: Collection[str]) -> bool:
    """Whether the parser has to see control tokens, for `SamplingParams.marks_control_tokens`.

    control_tokens: those of the model's vocabulary.
    """
    if writes_harmony(template_source) or _writes_gemma(template_source):
        return True
    return any(tag in template_source and tag in control_tokens for tag in _PLAIN_TAGS)


def call_format(template_source: str) -> CallFormat | None:
    """The format of calls that a chat template shows to the model; None if it shows none that is known, or
    that of messages on channels.
    """
    if "<function=" in template_source and "<parameter=" in template_source:
        return XmlCalls()
    if "<arg_key>" in template_source and "<arg_value>" in template_source:
        return ArgCalls(has_lines=_ARG_LINES.search(template_source) is not None)
    if _writes_gemma(template_source):
        return GemmaCalls()
    if _HERMES_EXAMPLE.search(template_source):
        return HermesCalls()
    return None


def output_parser(
    template_source: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_thinking: bool,
    max_calls: int | None = MAX_CALLS,
    prompt_end: str = "",
) -> AnswerParser:
    """A parser for one answer of the model with this chat template.

    tools: those that may be called, in the shape of OpenAI's or Anthropic's API; without any, calls are
    content. is_thinking: whether the prompt ends inside a thought, see `prompt_opens_thought`. max_calls: of
    one answer, see `OutputParser`; None: any number. prompt_end: the last tokens of the prompt as text, which
    say in what message of several the answer begins.
    """
    signatures = ToolSignatures.of(tools)
    if writes_harmony(template_source):
        return HarmonyParser(signatures, prompt_end=prompt_end, max_calls=max_calls)
    thoughts = ThoughtTags() if THINK_END in template_source else None
    control = _PLAIN_TAGS
    if _writes_gemma(template_source):
        thoughts, control = gemma_calls.THOUGHTS, gemma_calls.TOKENS
    return OutputParser(
        call_format(template_source),
        signatures,
        thoughts=thoughts,
        is_thinking=is_thinking,
        max_calls=max_calls,
        control=control,
    )


def prompt_opens_thought(prompt: str) -> bool:
    """Whether a rendered prompt, or the end of it, leaves a thought open for the answer to go on with."""
    return prompt.rstrip().endswith(THINK)


def forced_calls(
    template_source: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    most_calls: int = 1,
    thinking_budget: int | None = None,
) -> Grammar:
    """The grammar of an answer that is 1 to `most_calls` calls of `tools`, or one where a call ends it.

    For `tool_choice`: "required" with all tools, or one that is named. `thinking_budget` bounds the thought
    where a grammar holds it; elsewhere `thought_after` does. Raises InvalidRequestError if there are no
    tools, if the model's chat template shows no format of calls, or if a tool's schema cannot be held.
    """
    calls, signatures = call_format(template_source), ToolSignatures.of(tools)
    if not signatures.schemas:
        raise InvalidRequestError(
            "tool_choice: a call is required, and there are no tools: give at least one"
        )
    if writes_harmony(template_source):
        return harmony_call(signatures, thinking_budget)
    if calls is None:
        raise InvalidRequestError(
            "tool_choice: this model's chat template shows no known format of calls: leave tool_choice out, "
            "or give the server a template that has one (--chat-template)"
        )
    return calls.forced(signatures, most_calls=most_calls)


def constrained_answer(
    template_source: str,
    constraint: Grammar,
    tools: Sequence[Mapping[str, Any]],
    *,
    most_calls: int = 1,
    thinking_budget: int | None = None,
) -> Grammar:
    """The grammar of an answer that is text of `constraint`, or calls of `tools`, if there are any.

    Otherwise as `forced_calls`.
    """
    if writes_harmony(template_source):
        return harmony_answer(constraint, ToolSignatures.of(tools), thinking_budget)
    if not tools or call_format(template_source) is None:
        return replace(constraint, calls="", frame="")
    return replace(
        constraint, calls=forced_calls(template_source, tools, most_calls=most_calls).text, frame=""
    )


def thought_after(
    template_source: str,
    prompt: str,
    *,
    budget: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Thought | None:
    """The thought that an answer to a prompt with this end may begin with; None if it has none.

    For `SamplingParams.thought`, so that a grammar begins behind it, and that it ends, in the words of the
    template, after `budget` tokens. In messages on channels a grammar holds the thought itself.
    """
    if writes_harmony(template_source):
        opening, closing = harmony.THOUGHT, harmony.END
        return Thought(is_open=False, opening=opening, closing=closing, budget=budget, forced=harmony.ANSWER)
    if _writes_gemma(template_source):
        return Thought(
            is_open=False,
            opening=gemma_calls.THOUGHT,
            closing=gemma_calls.THOUGHT_END,
            budget=budget,
            forced=gemma_calls.THOUGHT_END,
            tool_call=gemma_calls.OPEN if tools else "",
        )
    if THINK_END not in template_source or prompt.rstrip().endswith(THINK_END):
        return None
    if (found := _CLOSING_TEXT.search(template_source)) is not None:
        closing = found[2].replace("\\n", "\n")
    else:
        closing = THINK_END if _BARE_CLOSING.search(template_source) else f"\n{THINK_END}\n\n"
    calls = call_format(template_source) if tools else None
    return Thought(
        is_open=prompt_opens_thought(prompt),
        opening=THINK,
        closing=THINK_END,
        budget=budget,
        forced=closing,
        tool_call="" if calls is None else calls.openers[0],
    )
