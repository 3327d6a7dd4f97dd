"""Chat messages → the prompt that a model was trained on, by the template in its own file.

Unit of work: one conversation. Knows no token ids: it returns text in which the control tokens are told
apart, and `Tokenizer.encode_segments` makes ids of it. The template itself runs in `template_process.py`.

**Why no message can forge a turn.** Templates write control tokens as plain characters, so in the finished
text nothing distinguishes a template's `<|im_end|>` from a user's. Therefore, before rendering, each
character that is needed to spell a control token (for this family `|` alone) is replaced, in everything that
comes from the caller, by a private-use character that occurs nowhere in the conversation or the template. In
the output only the template's own control tokens can match; then the replaced characters are put back. One
character stands for one character, so no trimming, splitting, slicing or joining inside the template can undo
it, and lengths stay true. Conversations without these characters are rendered exactly as they are, so ids
equal those of any other implementation. The price: a template that looks for such a character in a message
does not find it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from coldstream.errors import InvalidRequestError, TemplateError
from coldstream.gguf.template_process import TemplateLimits, TemplateProcess
from coldstream.gguf.tokenizer import Segment
from coldstream.gguf.vocabulary import Vocabulary

FIELD = "tokenizer.chat_template"
ROLES = ("system", "developer", "user", "assistant", "tool")
# What a caller may set besides messages and tools; other names could shadow the renderer's own.
SETTINGS: Mapping[str, type] = {
    "enable_thinking": bool,
    "preserve_thinking": bool,
    "thinking": bool,
    "reasoning_effort": str,
}
# Preferred for telling control tokens apart: the tests inside templates rarely look for them.
PREFERRED_MARKED = "|｜"
PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class RenderedChat:
    """A prompt as `(control token, True)` and `(plain text, False)`, for `Tokenizer.encode_segments`."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The prompt as one text, for people. Encoding it would let messages forge control tokens."""
        return "".join(text for text, _ in self.segments)


class ChatTemplate:
    """A file's chat template. A context manager; may be shared between threads, which then take turns."""

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
        self._marked = _characters_to_mark(names)
        self._process = TemplateProcess(source, limits) if isinstance(source, str) else None
        self._source = source

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        vocabulary: Vocabulary | None = None,
        limits: TemplateLimits | None = None,
    ) -> "ChatTemplate":
        """The template of a file, whose vocabulary is read again unless given.

        A template that is absent or broken is no reason not to load a model: it raises when used, and plain
        completion works. Raises as `Vocabulary.from_metadata` does.
        """
        vocabulary = vocabulary or Vocabulary.from_metadata(metadata)
        ids = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id, "pad_token": vocabulary.pad_id}
        texts = {name: vocabulary.tokens[index] for name, index in ids.items() if index is not None}
        return cls(metadata.get(FIELD), vocabulary.control_ids, texts, limits)

    def check(self) -> None:
        """Compile now, so that the first rendering is as quick as the others. Raises `TemplateError`."""
        self._usable().start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **settings: Any,
    ) -> RenderedChat:
        """The prompt for `messages` and `tools`, which have the shape of OpenAI's API.

        `settings` are those of `SETTINGS`. Raises `InvalidRequestError` for messages, tools or settings in
        another shape, `TemplateError` when the template is absent, fails, refuses or reaches a limit.
        """
        process = self._usable()
        _check_settings(settings)
        checked = [_checked_message(*item) for item in enumerate(_as_list("messages", messages))]
        tool_list = None if tools is None else _as_list("tools", tools)
        request = {"messages": checked, "tools": tool_list, **settings}
        try:
            marks = self._choose_marks(request)
            variables = _replaced(request, marks)
        except RecursionError:
            raise InvalidRequestError("messages: nested too deeply") from None
        own = {"add_generation_prompt": add_generation_prompt, **self._special_texts}
        return RenderedChat(tuple(self._segments(process.render({**variables, **own}), marks)))

    def close(self) -> None:
        """End the process that renders, if it was started."""
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _usable(self) -> TemplateProcess:
        if self._process is None:
            kind = type(self._source).__name__
            found = "is absent" if self._source is None else f"is a {kind}, not a string"
            raise TemplateError(
                f"{FIELD} {found} in this file: it can't chat, complete plain prompts instead"
            )
        return self._process

    def _choose_marks(self, request: Mapping[str, Any]) -> dict[str, str]:
        """For each character to mark, a private-use character that neither request nor template holds.

        Neither in itself nor as a JSON escape, which is what becomes of it where a template asks for ASCII.
        """
        taken = "\n".join([*_strings(request), str(self._source)])
        chars = map(chr, PRIVATE_USE)
        free = (char for char in chars if char not in taken and _escape(char) not in taken)
        return dict(zip(self._marked, free, strict=False))

    def _segments(self, output: str, marks: Mapping[str, str]) -> Iterator[Segment]:
        output = _replaced(output, {_escape(mark): mark for mark in marks.values()})
        originals = {mark: char for char, mark in marks.items()}
        parts = self._control.split(output) if self._control is not None else [output]
        for index, part in enumerate(parts):
            if part:
                yield (part, True) if index % 2 else (_replaced(part, originals), False)


def _characters_to_mark(names: Sequence[str]) -> str:
    """A few characters of which every control token holds at least one."""
    marked = ""
    for name in names:
        if not any(char in name for char in marked):
            preferred = (char for char in PREFERRED_MARKED if char in name)
            punctuation = (char for char in name if not char.isalnum())
            marked += next(preferred, None) or next(punctuation, name[0])
    return marked


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1]


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _replaced(value: Any, replacements: Mapping[str, str]) -> Any:
    """A copy of a JSON value in which all strings, keys included, have their characters replaced."""
    if isinstance(value, str):
        for old, new in replacements.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        keys = (_replaced(key, replacements) if isinstance(key, str) else key for key in value)
        return dict(zip(keys, (_replaced(item, replacements) for item in value.values()), strict=True))
    if isinstance(value, list | tuple):
        return [_replaced(item, replacements) for item in value]
    return value


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if name not in SETTINGS:
            raise InvalidRequestError(
                f"chat template setting {name!r}: unknown, known are {', '.join(SETTINGS)}"
            )
        if type(value) is not SETTINGS[name]:
            wanted, given = SETTINGS[name].__name__, type(value).__name__
            raise InvalidRequestError(f"chat template setting {name}: expected a {wanted}, got a {given}")


def _as_list(name: str, values: object) -> list[Any]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequestError(f"{name}: expected a list of objects")
    return list(values)


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content is one string, the arguments of its calls are objects."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"messages[{index}].role: {role!r} is not one of {', '.join(ROLES)}")
    checked = {**message, "content": _plain_content(index, message.get("content"))}
    if message.get("tool_calls"):
        calls = _as_list(f"messages[{index}].tool_calls", message["tool_calls"])
        checked["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return checked


def _plain_content(index: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = _as_list(f"messages[{index}].content", content)
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"messages[{index}].content: only text parts, not {part.get('type')!r}")
    return "".join(part["text"] for part in parts)


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's API carries arguments as JSON text; templates walk through them as objects."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(call)
    return (
        {**call, "function": {**function, "arguments": arguments}}
        if isinstance(arguments, dict)
        else dict(call)
    )
