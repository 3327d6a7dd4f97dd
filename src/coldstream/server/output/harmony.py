"""Answers of gpt-oss, in OpenAI's Harmony format: messages on channels, each behind a header.

    <|channel|>analysis<|message|>THOUGHT<|end|>
    <|start|>assistant<|channel|>commentary<|message|>TEXT BEFORE CALLS<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

The recipient may also stand before the channel, and `functions.` may be missing. The first message has no
`<|start|>`, as the prompt ends with it. A call is emitted when it is complete, as only then it is known to be
JSON; one that is none is content. Messages to the tools that the model was trained with, which are not here
(`browser`, `python`, `container`), are left out. Texts of several messages have a line end between.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from coldstream.decoding import Grammar
from coldstream.engine.grammar_source import control_token
from coldstream.gguf.tokenizer import marked
from coldstream.json_text import dumped
from coldstream.server.output.call_format import held_parameters, lark_json
from coldstream.server.output.control_text import ControlText, kept_marked
from coldstream.server.output.events import (
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallTruncated,
)
from coldstream.server.output.parser import new_call_id
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.typed_values import finite_json, quoted

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN, CALL, RETURN = "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"
THOUGHT: Final = f"{CHANNEL}analysis{MESSAGE}"
ANSWER: Final = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"  # from a thought to the answer

_TOKENS: Final = kept_marked(START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
_FIRST_MARK: Final = marked("")[0]
_TOKEN: Final = re.compile("|".join(map(re.escape, _TOKENS.values())))
_TOKEN_TEXT: Final = re.compile("|".join(map(re.escape, _TOKENS)))
# What a header may begin with that is no token, before the name of a channel.
_HEADER_TEXT: Final = re.compile(r"\s*(assistant)?\s*(to=\S*\s*)?")
_BUILT_IN: Final = re.compile(r"(browser|python|container|assistant)(\.|$)")
_RECIPIENT: Final = re.compile(r"(?:^|\s|assistant)to=([^\s<]+)")
_CHANNEL_NAME: Final = re.compile(rf"{re.escape(marked(CHANNEL))}\s*([a-z]*)")
_FUNCTIONS: Final = "functions."
_MAX_HEADER_CHARS: Final = 512


class HarmonyParser:
    """The parser of one answer, with the interface of `OutputParser`."""

    def __init__(
        self,
        tools: ToolSignatures,
        *,
        prompt_end: str = f"{START}assistant",
        max_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """prompt_end: the last tokens of the prompt as text, which tell in what message the answer begins."""
        self._tools, self._max_calls, self._new_id = tools, max_calls, new_id
        self._control = ControlText(_TOKENS)
        self._text = ""  # text that is undecided
        self._header: str | None = ""  # of the message that comes; None: its body is being read
        self._kind: type[Content] | type[Reasoning] = Content
        self._call: str | None = None  # the name of the function that the body is a call of
        self._is_left_out = False  # whether the body is read by nobody
        self._num_calls = 0
        self._emitted: dict[
            type[Any], bool
        ] = {}  # kinds of which something was emitted, and whether it ended
        self._begin_in(prompt_end)

    def _begin_in(self, prompt_end: str) -> None:
        _, opened, header = prompt_end.rpartition(START)
        if opened and MESSAGE not in header:
            begun = _TOKEN_TEXT.sub(lambda match: marked(match[0]), header)
            self._header = begun if _FIRST_MARK in begun else ""
            return
        self._header = None
        self._kind = Reasoning if f"{CHANNEL}analysis" in header else Content

    @property
    def is_complete(self) -> bool:
        """Whether the answer has as many calls as it may have."""
        return self._max_calls is not None and self._num_calls >= self._max_calls

    def push(self, text: str) -> list[OutputEvent]:
        """What is known now. Never raises."""
        self._text += self._control.push(text)
        return self._advance(is_last=False)

    def finish(self) -> list[OutputEvent]:
        """The rest, when nothing more will come."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        while not self.is_complete and self._step(events, is_last):
            pass
        if self.is_complete:
            self._text = ""
        return events

    def _step(self, events: list[OutputEvent], is_last: bool) -> bool:
        """Reads up to the next control token. Whether to go on."""
        match = _TOKEN.search(self._text)
        text = self._text[: match.start()] if match else self._text
        token = match[0] if match else None
        if self._header is not None:
            return self._read_header(text, token, events, is_last)
        if token is None and self._call is not None and not is_last:
            return False
        self._text = self._text[len(text) + len(token or "") :]
        self._read_body(text, events, is_truncated=token is None)
        if token is not None:
            is_next = token == marked(CHANNEL)
            self._header, self._call = (token if is_next else ""), None
        return token is not None

    def _read_header(self, text: str, token: str | None, events: list[OutputEvent], is_last: bool) -> bool:
        assert self._header is not None
        if _FIRST_MARK not in self._header:  # so far there is nothing but text, which may be no header
            head = self._header + text
            if not _may_be_header(head):
                self._begin_body("")
                self._text = head + self._text[len(text) :]
                return True
        if token is None:
            if is_last or len(self._header) + len(text) > _MAX_HEADER_CHARS:
                self._header, self._text = self._header + text, ""
                return self._lost_header(events)
            return False
        self._text = self._text[len(text) + len(token) :]
        if token == marked(MESSAGE):
            self._begin_body(self._header + text)
        elif token in (marked(CHANNEL), marked(CONSTRAIN)):
            self._header += text + token
        else:  # a message that ended in its header, or another one that begins
            self._header = ""
        return True

    def _lost_header(self, events: list[OutputEvent]) -> bool:
        """A header without a message is nothing to read; without a channel it is the answer's text."""
        assert self._header is not None
        header, self._header = self._header, ""
        if _FIRST_MARK not in header and _HEADER_TEXT.fullmatch(header) is None:
            self._emit(Content, header, events)
        return False

    def _begin_body(self, header: str) -> None:
        self._header = None
        channel = _CHANNEL_NAME.findall(header)
        self._kind = Reasoning if channel and channel[-1] == "analysis" else Content
        recipient = _RECIPIENT.search(_TOKEN.sub(" ", header))
        name = "" if recipient is None else recipient[1]
        self._is_left_out = _BUILT_IN.match(name) is not None and name not in self._tools.schemas
        if name and self._tools.schemas and not self._is_left_out:
            self._call = name.removeprefix(_FUNCTIONS)
        for kind in self._emitted:
            self._emitted[kind] = True

    def _read_body(self, text: str, events: list[OutputEvent], *, is_truncated: bool) -> None:
        if self._call is None:
            self._emit(self._kind, text, events)
            return
        arguments = _arguments(text)
        if arguments is None and not is_truncated:
            self._emit(Content, text, events)
            return
        index = self._num_calls
        events.append(ToolCallStart(index, self._new_id(), self._call))
        if arguments is None:
            events.append(ToolCallTruncated(index, text))
        else:
            events += (ToolCallArguments(index, arguments), ToolCallEnd(index))
        self._num_calls += 1
        self._call = None

    def _emit(self, kind: type[Content] | type[Reasoning], text: str, events: list[OutputEvent]) -> None:
        if text and not self._is_left_out:
            between = "\n" if self._emitted.get(kind) else ""
            self._emitted[kind] = False
            events.append(kind(f"{between}{text}"))


def _may_be_header(text: str) -> bool:
    """Whether text without a control token may be the beginning of a message's header."""
    if _HEADER_TEXT.fullmatch(text) is not None:
        return True
    begun = text.lstrip()
    return "assistant".startswith(begun) or "to=".startswith(begun.removeprefix("assistant").lstrip())


def _arguments(text: str) -> str | None:
    """The arguments of a call as JSON; None if the text is no object."""
    try:
        value = finite_json(text, is_strict=False) if text.strip() else {}
    except ValueError:
        return None
    return dumped(value) if isinstance(value, dict) else None


# --- grammars ---------------------------------------------------------------------------------------------


def _thought_rule(budget: int | None) -> str:
    """The rule of a thought of at most `budget` tokens; None: of any number."""
    text = "" if budget == 0 else " thought"
    limit = "" if budget is None else f"[max_tokens={budget}]"
    return (
        f'analysis: {control_token(CHANNEL)} "analysis" {control_token(MESSAGE)}{text} {control_token(END)} '
        f'{control_token(START)} "assistant"\nthought{limit}: /(?s:.*)/'
    )


def harmony_call(tools: ToolSignatures, thinking_budget: int | None = None) -> Grammar:
    """What matches one call of `tools`, perhaps behind a thought. A call ends the answer."""
    calls = _call_rules(tools)
    start = f"start: analysis? ({' | '.join(calls)})"
    return Grammar("lark", "\n".join((start, _thought_rule(thinking_budget), *calls.values())))


def harmony_answer(constraint: Grammar, tools: ToolSignatures, thinking_budget: int | None = None) -> Grammar:
    """What matches text of `constraint` as the final message, or one call of `tools`, perhaps behind a
    thought.
    """
    # llguidance reads rules of one grammar together: of a grammar of its own for the calls it would not see
    # the beginning where a rule has a limit of tokens.
    calls = _call_rules(tools)
    final = f'final: {control_token(CHANNEL)} "final" {control_token(MESSAGE)} @own'
    start = f"start: analysis? ({' | '.join(('final', *calls))})"
    frame = "\n".join((start, final, _thought_rule(thinking_budget), *calls.values()))
    return replace(constraint, calls="", frame=frame)


def _call_rules(tools: ToolSignatures) -> dict[str, str]:
    """The rule of a call of each tool, by its name in the grammar."""
    rules = {}
    for index, name in enumerate(tools.schemas):
        held = held_parameters(tools, name)
        schema = lark_json(held.alone(held.root), is_strict=name in tools.strict)
        rules[f"call_{index}"] = (
            f"call_{index}: {control_token(CHANNEL)} {quoted(f'commentary to={_FUNCTIONS}{name} ')} "
            f'{control_token(CONSTRAIN)} "json" {control_token(MESSAGE)} {schema}'
        )
    return rules
