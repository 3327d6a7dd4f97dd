"""Chat messages → the prompt that a model was trained on, by the template in its own file.

Unit of work: one conversation. Knows no token ids: it returns text in which the control tokens are
marked, and `Tokenizer.encode_segments` makes ids of it. The template itself runs in `template_process.py`.

**Why no message can forge a turn.** Templates write control tokens as plain characters, so nothing in a
finished text distinguishes a template's `<|im_end|>` from a user's. Therefore the renderer notes who wrote
each character (`template_environment.py`), and a control token counts only if the template wrote all of it:
its source, the special tokens of the file, or a message's role, which is one of `ROLES`. A forged token would
need a character that the caller gave and that counts as written, and there is none: text from the caller
(contents, reasoning, names, arguments, keys, tools, settings) enters as given, what is computed from given
text alone stays given whatever the operation, and text of both origins keeps them character by character or
becomes given altogether. So it doesn't matter where a token's pieces lie, or what joins, splits, trims,
replaces or re-cases them. Nor does it matter whether they were printed as JSON or as a list, or that a
template's `<|im_` stands before a message's `end|>`. Numbers and dates that a template prints count as given
too.

Nothing is hidden from the template: it sees the very messages, and takes the decisions that it would take
anywhere. So the text of a prompt equals that of other implementations, forged tokens included, and the ids
differ exactly where they parse what a caller spelt. A token that the file calls user-defined (`<think>` in
Qwen's) is no control token: any text may hold it. The price: a template's own control token counts as text if
it went through an operation that keeps no origins, such as `tojson` or `%`.

**What a template does not accept** is not the caller's business: `fitted_messages.py` gives system messages
in the middle and other orders of roles a form that this template shows, and `template_capabilities.py` maps
efforts to those that it knows. All who chat render here, so there is one way in which that is done.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coldstream.closing import Closing
from coldstream.errors import InvalidRequestError, TemplateError, TemplateLimitError, shown
from coldstream.gguf.fitted_messages import fitted_messages
from coldstream.gguf.template_capabilities import EFFORTS, TemplateCapabilities
from coldstream.gguf.template_process import Rendering, TemplateLimits, TemplateProcess
from coldstream.gguf.tokenizer import Segment
from coldstream.gguf.vocabulary import Vocabulary
from coldstream.json_text import loaded

FIELD = "tokenizer.chat_template"
ROLES = ("system", "developer", "user", "assistant", "tool")
# Settings that a caller may pass besides messages and tools; other names could shadow the renderer's own.
SETTINGS: Mapping[str, type] = {
    "enable_thinking": bool,
    "preserve_thinking": bool,
    "thinking": bool,
    "reasoning_effort": str,
}
# The names of a message's reasoning; the first one present counts.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class RenderedChat:
    """A prompt as `(control token, True)` and `(plain text, False)`, for `Tokenizer.encode_segments`."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The prompt as one text, for people. Encoding it would let messages forge control tokens."""
        return "".join(text for text, _ in self.segments)


class ChatTemplate(Closing):
    """A file's chat template. A context manager; may be shared between threads, which wait for each other."""

    def __init__(
        self,
        source: object,
        control_tokens: Iterable[str],
        special_texts: Mapping[str, str],
        limits: TemplateLimits | None = None,
    ) -> None:
        self._special_texts = dict(special_texts)
        names = sorted(control_tokens, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._process = TemplateProcess(source, limits) if isinstance(source, str) else None
        self._source = source

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        vocabulary: Vocabulary | None = None,
        limits: TemplateLimits | None = None,
        source: str | None = None,
    ) -> "ChatTemplate":
        """The template of a file, whose vocabulary is read again unless given, or that of `source`.

        A template that is absent or broken is no reason not to load a model: it raises when used, and plain
        completion works. Raises as `Vocabulary.from_metadata` does.
        """
        vocabulary = vocabulary or Vocabulary.from_metadata(metadata)
        ids = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id, "pad_token": vocabulary.pad_id}
        texts = {name: vocabulary.tokens[index] for name, index in ids.items() if index is not None}
        own = metadata.get(FIELD) if source is None else source
        return cls(own, vocabulary.control_ids, texts, limits)

    @property
    def source(self) -> str | None:
        """The template as it was written; None if there is none."""
        return self._source if isinstance(self._source, str) else None

    def check(self) -> None:
        """Compile now, so that the first rendering is as quick as the others. Raises `TemplateError`."""
        self._usable().start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **settings: Any,
    ) -> RenderedChat:
        """The prompt for `messages` and `tools`, which have the shape of OpenAI's API.

        `settings` are those of `SETTINGS`. With `continue_final_message` the prompt ends within the last
        message, the assistant's, so that the answer goes on with its text. Raises `InvalidRequestError` for
        messages, tools or settings in another shape, `TemplateError` when the template is absent, fails,
        refuses or reaches a limit.
        """
        self._usable()
        check_settings(settings)
        checked = [_checked_message(*item) for item in enumerate(_as_list("messages", messages))]
        tool_list = None if tools is None else _as_list("tools", tools)
        if continue_final_message:
            _check_continued(checked, add_generation_prompt)
        fitted = fitted_messages(checked, self.capabilities)
        end = _unused_word(fitted) if continue_final_message else ""
        if continue_final_message:
            fitted[-1] = {**fitted[-1], "content": fitted[-1].get("content", "") + end}
        variables = {
            "tools": self.capabilities.with_tools(tool_list),
            **self.capabilities.with_known_effort(settings),
        }
        shown = self.capabilities.with_contents(fitted)
        rendering = self._rendered(shown, variables, add_generation_prompt)
        return RenderedChat(tuple(self._segments(_until(rendering, end) if end else rendering)))

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """What the template accepts and knows. Raises `TemplateError` if it is absent."""
        self._usable()

        def render(messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
            return self._rendered(messages, {"tools": None, **settings}, True).text

        return TemplateCapabilities(render, str(self._source))

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], add_generation_prompt: bool
    ) -> Rendering:
        process = self._usable()
        own = {"add_generation_prompt": add_generation_prompt, **self._special_texts}
        opened = [_with_arguments(message, _opened_arguments) for message in messages]
        try:
            return process.render({"messages": opened, "documents": None, **variables}, own, ROLES)
        except TemplateLimitError:
            raise
        except TemplateError as error:
            # Older templates, DeepSeek's among them, write arguments as text.
            closed = [_with_arguments(message, _closed_arguments) for message in messages]
            if closed == opened:
                raise
            try:
                return process.render({"messages": closed, "documents": None, **variables}, own, ROLES)
            except TemplateError:
                raise error from None

    def close(self) -> None:
        """End the process that renders, if it was started."""
        if self._process is not None:
            self._process.close()

    def _usable(self) -> TemplateProcess:
        if self._process is None:
            kind = type(self._source).__name__
            found = "is absent" if self._source is None else f"is a {kind}, not a string"
            raise TemplateError(
                f"{FIELD} {found} in this file: it can't chat, complete plain prompts instead"
            )
        return self._process

    def _segments(self, rendering: Rendering) -> Iterator[Segment]:
        text, end = rendering.text, 0
        for start, stop in self._control_tokens(rendering):
            if end < start:
                yield text[end:start], False
            yield text[start:stop], True
            end = stop
        if end < len(text):
            yield text[end:], False

    def _control_tokens(self, rendering: Rendering) -> Iterator[tuple[int, int]]:
        """Where the template wrote control tokens."""
        if self._control is None:
            return
        for start, stop in rendering.written:
            for match in self._control.finditer(rendering.text, start, stop):
                yield match.span()


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for settings that are none of `SETTINGS`, and efforts none of `EFFORTS`."""
    for name, value in settings.items():
        if name not in SETTINGS:
            raise InvalidRequestError(
                f"chat template setting {name!r}: unknown, known are {', '.join(SETTINGS)}"
            )
        if type(value) is not SETTINGS[name]:
            wanted, given = SETTINGS[name].__name__, type(value).__name__
            raise InvalidRequestError(f"chat template setting {name}: expected a {wanted}, got a {given}")
    effort = settings.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequestError(f"reasoning_effort: {shown(effort)} is none of {', '.join(EFFORTS)}")


def _as_list(name: str, values: object) -> list[Any]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequestError(f"{name}: expected a list of objects")
    return list(values)


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it, except for the arguments of its calls.

    Content is one string. What is null is left out: templates would print it as "None".
    """
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"messages[{index}].role: {role!r} is not one of {', '.join(ROLES)}")
    checked = {name: value for name, value in message.items() if value is not None}
    if "content" in checked:
        checked["content"] = _plain_content(index, checked["content"])
    if checked.get("tool_calls"):
        checked["tool_calls"] = _as_list(f"messages[{index}].tool_calls", checked["tool_calls"])
    reasoning = next((checked[name] for name in REASONING_NAMES if name in checked), None)
    if reasoning is None:
        return checked
    return {"thinking": reasoning, **checked, "reasoning_content": reasoning}  # gpt-oss reads `thinking`


def _plain_content(index: int, content: object) -> str:
    if isinstance(content, str):
        return content
    parts = _as_list(f"messages[{index}].content", content)
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"messages[{index}].content: only text parts, not {part.get('type')!r}")
    return "".join(part["text"] for part in parts)


def _check_continued(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> None:
    """Raises InvalidRequestError for what cannot be gone on with."""
    name = "continue_final_message"
    if add_generation_prompt:
        raise InvalidRequestError(f"{name}: not together with add_generation_prompt, which begins an answer")
    if not messages or messages[-1]["role"] != "assistant":
        raise InvalidRequestError(f"{name}: the last message must be the assistant's")
    if messages[-1].get("tool_calls"):
        raise InvalidRequestError(f"{name}: the last message has tool_calls, behind which no text can come")


def _unused_word(messages: Sequence[Mapping[str, Any]]) -> str:
    """A word that is in none of the messages."""
    text = str(messages)
    return next(word for index in itertools.count() if (word := f"qvzwend{index}x") not in text)


def _until(rendering: Rendering, end: str) -> Rendering:
    """`rendering` up to where `end` begins. Raises TemplateError if it is not there once."""
    if rendering.text.count(end) != 1:
        raise TemplateError("chat template: it does not show the last message once: it cannot be continued")
    length = rendering.text.index(end)
    written = [(start, min(stop, length)) for start, stop in rendering.written if start < length]
    return Rendering(rendering.text[:length], tuple(written))


def _with_arguments(message: Mapping[str, Any], convert: Callable[[object], object]) -> Mapping[str, Any]:
    """`message` with the arguments of its calls as `convert` gives them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, Mapping):
            arguments = convert(function.get("arguments"))
            calls.append({**call, "function": {**function, "arguments": arguments}})
        else:
            calls.append(call)
    return {**message, "tool_calls": calls}


def _opened_arguments(arguments: object) -> Mapping[str, Any]:
    """Arguments as an object: OpenAI's API carries them as JSON text, templates walk through them.

    Nothing means none. What is no JSON, as a weak model may have written it, or no object is one with that
    under the name `arguments`.
    """
    if isinstance(arguments, str):
        try:
            arguments = loaded(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return {"arguments": arguments}
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _closed_arguments(arguments: object) -> str:
    """Arguments as JSON text, a text as it is."""
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)
