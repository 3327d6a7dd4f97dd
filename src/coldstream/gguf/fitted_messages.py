"""Conversations as a chat template accepts them: any order of roles becomes one that it was written for.

Clients send system messages in the middle, begin with the assistant, or send two messages of the user in a
row. Many templates refuse that, or leave messages out in silence. What a template accepts stays as it is. The
rest keeps its text and its place in the conversation, so that what was computed for the messages before stays
of use:

- Developer messages are system messages. Several of them at the beginning are one.
- A system message that the template would not show where it is becomes a text of the user, in a frame that
  says what it is. Behind the result of a tool it is put below the result if a new message of the user would
  make the template leave out the thoughts before it.
- Where a message of the user is needed and there is none, a note says that there is none.
- Messages of one side that may not follow each other are one, with blank lines between.
- Calls and results of tools that a template does not show are texts of the two roles. Where it shows only the
  first call of a message, each is a message of its own, with its result behind it. Where it refuses a text
  beside the thought of a call, the text is the end of the thought.

What is given is decided by what the template is and by the messages before, never by later ones. Knows no
control tokens: all text that is written here counts as the caller's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from coldstream.errors import InvalidRequestError
from coldstream.gguf.template_capabilities import TemplateCapabilities

Message = dict[str, Any]

REASONING: Final = ("reasoning_content", "thinking", "reasoning")  # the names that templates read
SYSTEM_FRAME: Final = "[System message]\n{}\n[End of the system message]"
NO_USER: Final = "[The user has not written anything yet.]"
CALL_FRAME: Final = "[Call of {}]\n{}"
RESULT_FRAME: Final = "[Result of {}]\n{}"


def fitted_messages(messages: Sequence[Mapping[str, Any]], template: TemplateCapabilities) -> list[Message]:
    """`messages`, whose contents are texts, as the template accepts them. The given ones are not changed."""
    turns = [_with_role(message) for message in messages]
    if _is_plain(turns) or not template.shows_turns:
        return [dict(message) for message in messages]
    if any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns):
        turns = _with_calls(turns, template)
    leading = list(takewhile(lambda turn: turn["role"] == "system", turns))
    opening = _opening(leading, template)
    rest = _with_late_systems(turns[len(leading) :], template)
    return _alternating([*opening, *_needed_user([*opening, *rest], template), *rest], template)


def _with_role(message: Mapping[str, Any]) -> Message:
    turn = dict(message)
    if turn["role"] == "developer":
        turn["role"] = "system"
    return turn


def _is_plain(turns: Sequence[Message]) -> bool:
    """Whether the user and the assistant alternate, which every template accepts."""
    return not any(turn.get("tool_calls") for turn in turns) and all(
        turn["role"] == ("assistant" if index % 2 else "user") for index, turn in enumerate(turns)
    )


def _text(turn: Message) -> str:
    return str(turn.get("content") or "")


def _opening(leading: Sequence[Message], template: TemplateCapabilities) -> list[Message]:
    """What the conversation begins with, of its first system messages."""
    if not leading:
        return []
    system = leading[0] if len(leading) == 1 else {**leading[0], "content": "\n\n".join(map(_text, leading))}
    if template.accepts_system:
        return [system]
    return [_framed(system)] if _text(system) else []


def _framed(system: Message) -> Message:
    return {"role": "user", "content": SYSTEM_FRAME.format(_text(system))}


def _with_late_systems(turns: Sequence[Message], template: TemplateCapabilities) -> list[Message]:
    if not any(turn["role"] == "system" for turn in turns) or template.accepts_late_system:
        return list(turns)
    placed: list[list[Message]] = []  # each what becomes one message
    for turn in turns:
        if turn["role"] != "system":
            placed.append([turn])
        elif not _text(turn):
            continue
        elif placed and placed[-1][0]["role"] == "tool" and template.drops_thoughts:
            placed[-1].append(_framed(turn))
        else:
            placed.append([_framed(turn)])
    return list(map(_joined, placed))


def _needed_user(turns: Sequence[Message], template: TemplateCapabilities) -> list[Message]:
    """A note in the place of the user's message that the template needs, if it needs one."""
    spoken = [turn["role"] for turn in turns if turn["role"] != "system"]
    if "user" not in spoken:
        is_fine = template.accepts_no_user and (not spoken or template.accepts_assistant_first)
    else:
        is_fine = spoken[0] == "user" or template.accepts_assistant_first
    return [] if is_fine else [{"role": "user", "content": NO_USER}]


def _alternating(turns: Sequence[Message], template: TemplateCapabilities) -> list[Message]:
    """`turns` in which messages of one side follow each other only where that is accepted."""
    groups: list[list[Message]] = []  # each what becomes one message
    for turn in turns:
        if groups and groups[-1][0]["role"] == turn["role"] and _is_to_join(turn["role"], template):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return list(map(_joined, groups))


def _is_to_join(role: str, template: TemplateCapabilities) -> bool:
    if role == "user":
        return not template.accepts_repeated_user
    return role == "assistant" and not template.accepts_repeated_assistant


def _joined(messages: Sequence[Message]) -> Message:
    """Messages of one side, one or more, as one. Fields are the first's, and calls come after all text."""
    if len(messages) == 1:
        return messages[0]
    whole: Message = {}
    for message in reversed(messages):
        whole |= message
    for name in ("content", *REASONING):
        if name in whole:
            texts = (each.get(name) for each in messages)
            whole[name] = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    if calls := [call for each in messages for call in each.get("tool_calls") or ()]:
        whole["tool_calls"] = calls
    return whole


def _with_calls(turns: list[Message], template: TemplateCapabilities) -> list[Message]:
    """Calls and results as the template shows them."""
    if not template.accepts_tools:
        return list(_with_tools_as_text(turns))
    if any(len(turn.get("tool_calls") or ()) > 1 for turn in turns) and not template.accepts_several_calls:
        turns = list(_with_single_calls(turns))
    has_both = any(
        turn.get("tool_calls") and _text(turn) and any(turn.get(name) for name in REASONING) for turn in turns
    )
    if has_both and not template.accepts_text_beside_thoughts_of_calls:
        turns = list(map(_with_text_as_thought, turns))
    return turns


def _with_single_calls(turns: Sequence[Message]) -> Iterator[Message]:
    """Each call as a message of its own, with its result behind it."""
    index = 0
    while index < len(turns):
        turn, index = turns[index], index + 1
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            yield turn
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", turns[index:]))
        index += len(results)
        bare = {name: value for name, value in turn.items() if name not in ("content", *REASONING)}
        for place, call in enumerate(calls):
            yield {**(turn if place == 0 else {**bare, "content": ""}), "tool_calls": [call]}
            own = [each for each in results if each.get("tool_call_id") == call.get("id")] or results[:1]
            yield from own
            results = [each for each in results if not any(each is other for other in own)]
        yield from results


def _with_text_as_thought(turn: Message) -> Message:
    """A message with calls whose text is the end of its thought."""
    if not (turn.get("tool_calls") and _text(turn)):
        return turn
    thoughts = {name: f"{turn[name]}\n\n{_text(turn)}" for name in REASONING if turn.get(name)}
    return {**turn, **thoughts, "content": ""} if thoughts else turn


def _with_tools_as_text(turns: Sequence[Message]) -> Iterator[Message]:
    names: dict[str, Any] = {}  # names of functions by the ids of their calls
    for turn in turns:
        if turn["role"] == "tool":
            name = turn.get("name") or names.get(str(turn.get("tool_call_id"))) or "a tool"
            yield {"role": "user", "content": RESULT_FRAME.format(name, _text(turn))}
        elif turn.get("tool_calls"):
            texts = [_text(turn)]
            for call in turn["tool_calls"]:
                function = call["function"] if isinstance(call.get("function"), Mapping) else {}
                names[str(call.get("id"))] = function.get("name")
                texts.append(CALL_FRAME.format(function.get("name"), _as_text(function.get("arguments"))))
            rest = {name: value for name, value in turn.items() if name != "tool_calls"}
            yield {**rest, "content": "\n\n".join(filter(None, texts))}
        else:
            yield turn


def _as_text(arguments: object) -> str:
    """Arguments as the caller wrote them, or as JSON. Raises InvalidRequestError for other values."""
    try:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages: the arguments of a call are no JSON: {error}") from None
